//! The emulated device: the sources of `kernels/cuda`, compiled for this processor.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use libloading::Library;

use super::device::Device;

/// The compiled kernels.
pub struct Machine {
    library: Library,
}

/// A marked index.
pub struct Site {
    /// The source's name.
    pub file: String,
    /// Its line.
    pub line: usize,
}

/// One case's memory and launches, on the thread that made it.
pub struct Session<'a> {
    machine: &'a Machine,
    backwards: bool,
}

type Kernel = unsafe extern "C" fn(*const c_void);

/// A folder of this package, which another's tests may include.
fn folder(name: &str) -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let kernels = package.join("kernels");
    if kernels.exists() { kernels.join(name) } else { package.join(name) }
}

fn sources(extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder("cuda")).expect("kernels/cuda");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|found| found == extension));
    paths.sort();
    paths
}

/// The first C++ compiler of the usual ones.
fn compiler() -> &'static str {
    let works = |name: &&&str| Command::new(name).arg("--version").stdout(Stdio::null()).status().is_ok();
    ["c++", "g++", "clang++"].iter().find(works).expect(
        "no C++ compiler: this test compiles the GPU kernels for the CPU. Install g++ or clang++ (Debian: apt-get install \
         g++; macOS: xcode-select --install)",
    )
}

impl Machine {
    /// The one of this process: signals have one handler.
    ///
    /// # Panics
    /// If there is no C++ compiler, or it refuses.
    pub fn get() -> &'static Self {
        static MACHINE: OnceLock<Machine> = OnceLock::new();
        MACHINE.get_or_init(Self::load)
    }

    /// Compiles and loads the kernels.
    fn load() -> Self {
        let (compiler, emulator) = (compiler(), folder("tests/emulator"));
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("emulated-{}", std::process::id()));
        std::fs::create_dir_all(&out).expect("a folder for the compiled kernels");
        let compile = |source: &Path, object: &Path| -> Child {
            let mut command = Command::new(compiler);
            command.args([
                "-std=c++17",
                "-O1",
                "-fPIC",
                "-ffp-contract=off",
                "-U_FORTIFY_SOURCE",
                "-w",
                "-x",
                "c++",
                "-c",
            ]);
            // What a sanitizer finds ends in a signal, which the machine reports.
            command.args(["-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"]);
            command.arg("-include").arg(emulator.join("cuda.h")).arg(source).arg("-o").arg(object);
            command.spawn().expect("the compiler starts")
        };
        let mut sources = sources("cu");
        sources.extend(["machine.cpp", "faults.cu"].map(|name| emulator.join(name)));
        let objects: Vec<_> = (0..sources.len()).map(|i| out.join(format!("{i}.o"))).collect();
        for (sources, objects) in sources.chunks(2).zip(objects.chunks(2)) {
            let children: Vec<_> = sources.iter().zip(objects).map(|(s, o)| compile(s, o)).collect();
            for (mut child, source) in children.into_iter().zip(sources) {
                assert!(child.wait().expect("the compiler ends").success(), "{} does not compile", source.display());
            }
        }
        let path = out.join("kernels.so");
        let linked = Command::new(compiler).arg("-shared").args(&objects).arg("-o").arg(&path).status();
        assert!(linked.expect("the linker starts").success(), "the kernels do not link");
        // SAFETY: our own code, which has no constructors with effects.
        let library = unsafe { Library::new(&path) }.expect("the kernels load");
        let _ = std::fs::remove_dir_all(&out); // what is loaded stays
        Self { library }
    }

    /// A session on this thread.
    pub fn session(&self, backwards: bool) -> Session<'_> {
        let session = Session { machine: self, backwards };
        session.mutate(&Site { file: String::new(), line: 0 });
        session
    }

    /// Every line that marks an index.
    pub fn sites(&self) -> Vec<Site> {
        let files = sources("cu").into_iter().chain(sources("cuh"));
        let sites = files.flat_map(|path| {
            let text = std::fs::read_to_string(&path).expect("a source");
            let file = path.file_name().expect("a name").to_string_lossy().into_owned();
            let lines =
                text.lines().enumerate().filter(|(_, line)| line.contains("AT(") && !line.contains("AT(index)"));
            lines.map(|(i, _)| Site { file: file.clone(), line: i + 1 }).collect::<Vec<_>>()
        });
        sites.collect()
    }

    fn function<T>(&self, name: &str) -> Result<libloading::Symbol<'_, T>, String> {
        // SAFETY: callers ask for the types that machine.cpp and `KERNEL` define.
        unsafe { self.library.get(name.as_bytes()) }.map_err(|_| format!("there is no {name}"))
    }
}

impl Session<'_> {
    /// Makes one index wrong.
    pub fn mutate(&self, site: &Site) {
        // The sources' names as the compiler was given them; kept, because the machine keeps the pointer.
        let path = folder("cuda").join(&site.file);
        let path = CString::new(path.to_string_lossy().as_bytes()).expect("a path").into_raw();
        type Mutate = unsafe extern "C" fn(*const c_char, c_int);
        let mutate = self.machine.function::<Mutate>("machine_mutate").expect("machine.cpp");
        // SAFETY: the string is never freed.
        unsafe { mutate(path, site.line as c_int) }
    }
}

impl Session<'_> {
    /// Frees what `upload` returned, before the session ends.
    #[allow(dead_code)] // the engine's tests do
    pub fn free(&mut self, address: u64) {
        let free =
            self.machine.function::<unsafe extern "C" fn(*const u8)>("machine_free_buffer").expect("machine.cpp");
        // SAFETY: a buffer that nobody uses any more is unmapped; any other address is none of this session's buffers.
        unsafe { free(address as *const u8) }
    }
}

impl Device for Session<'_> {
    fn upload(&mut self, bytes: &[u8]) -> u64 {
        let buffer =
            self.machine.function::<unsafe extern "C" fn(usize) -> *mut u8>("machine_buffer").expect("machine.cpp");
        // SAFETY: the buffer has as many bytes.
        unsafe {
            let at = buffer(bytes.len());
            at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            at as u64
        }
    }

    fn download(&mut self, address: u64, bytes: &mut [u8]) {
        // SAFETY: a span of a buffer that `upload` made in this session.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(address as *const u8, bytes.len()) }
    }

    fn launch(&mut self, kernel: &'static str, grid: [u32; 3], block: [u32; 3], params: &[u8]) -> Result<(), String> {
        let size = self.machine.function::<unsafe extern "C" fn() -> usize>(&format!("{kernel}_params"))?;
        // SAFETY: `KERNEL` defines it.
        let size = unsafe { size() };
        if size != params.len() {
            return Err(format!("its parameters have {size} bytes, not {}", params.len()));
        }
        type Run = unsafe extern "C" fn(Kernel, *const u32, *const u32, *const c_void, c_int) -> *const c_char;
        let run = self.machine.function::<Run>("machine_launch")?;
        let kernel = self.machine.function::<Kernel>(kernel)?;
        // SAFETY: the kernel gets its parameters; what it does wrong, the machine catches.
        let error = unsafe {
            let error = run(*kernel, grid.as_ptr(), block.as_ptr(), params.as_ptr().cast(), self.backwards.into());
            if error.is_null() { None } else { Some(CStr::from_ptr(error).to_string_lossy().into_owned()) }
        };
        error.map_or(Ok(()), Err)
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if let Ok(free) = self.machine.function::<unsafe extern "C" fn()>("machine_free_buffers") {
            // SAFETY: the session ends, and its spans with it.
            unsafe { free() }
        }
    }
}
