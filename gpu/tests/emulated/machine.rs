//! The emulated device: the sources of `gpu/shaders` in either dialect, compiled for the CPU.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use foretoken_gpu::Launch;
use libloading::Library;

use super::device::Device;

/// The compiled kernels.
pub struct Machine {
    machine: Library,
    kernels: Vec<(Dialect, Library)>,
    sites: Vec<Site>, // of all sources, numbered from 1
}

/// A kernel language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// CUDA C++.
    Cuda,
    /// The Metal Shading Language.
    Metal,
}

impl Dialect {
    /// All.
    pub const ALL: [Self; 2] = [Self::Cuda, Self::Metal];

    /// Whether a source has code of another dialect only.
    fn lacks(self, file: &str) -> bool {
        Self::ALL.iter().any(|of| *of != self && of.headers().2 == file)
            || self == Self::Metal && file == "attend_halves.h"
    }

    /// The emulator's header, and the folder and the file of the dialect that it includes.
    const fn headers(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Cuda => ("cuda.h", "cuda", "device.cuh"),
            Self::Metal => ("metal.h", "metal", "device.metal"),
        }
    }
}

/// An index marked with `AT`.
#[derive(Clone)]
pub struct Site {
    /// The source's name.
    pub file: String,
    /// Its line, from 1.
    pub line: usize,
    /// Its index in the line, from 1.
    pub nth: usize,
    number: c_int,
}

/// One case's memory and launches, on one thread.
pub struct Session<'a> {
    machine: &'a Machine,
    dialect: Dialect,
    backwards: bool,
}

type Kernel = unsafe extern "C" fn(*const c_void);

/// A folder of the package `foretoken-gpu`; the root package's tests also include this file.
fn folder(name: &str) -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let gpu = package.join("gpu");
    if gpu.exists() { gpu.join(name) } else { package.join(name) }
}

fn sources(extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder("shaders")).expect("gpu/shaders");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|found| found == extension));
    paths.sort();
    paths
}

/// The first C++ compiler found.
pub fn compiler() -> Result<&'static str, &'static str> {
    let works = |name: &&str| Command::new(name).arg("--version").stdout(Stdio::null()).status().is_ok();
    ["c++", "g++", "clang++"].into_iter().find(works).ok_or(
        "there is no C++ compiler, which compiles the GPU kernels for the CPU; install g++ or clang++ (Debian: apt-get \
         install g++; macOS: xcode-select --install)",
    )
}

/// The options with which `fmaf` is an instruction instead of a call, if this processor has it.
fn fused_multiply_add() -> &'static [&'static str] {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        return &["-mavx2", "-mfma"];
    }
    &[]
}

/// Copies a source and numbers every marked index, because a macro cannot tell two uses on one line apart.
fn copy(from: &Path, to: &Path, sites: &mut Vec<Site>) {
    let text = std::fs::read_to_string(from).expect("a source");
    let file = from.file_name().expect("a name").to_string_lossy();
    let mut numbered = String::new();
    for (i, line) in text.lines().enumerate() {
        let parts: Vec<_> = if line.contains("AT(index)") { vec![line] } else { line.split("AT(").collect() };
        numbered += parts[0];
        for (nth, part) in parts.iter().enumerate().skip(1) {
            let number = sites.len() as c_int + 1;
            sites.push(Site { file: file.clone().into_owned(), line: i + 1, nth, number });
            numbered += &format!("NUMBERED_AT({number}, {part}");
        }
        numbered.push('\n');
    }
    std::fs::write(to.join(&*file), numbered).expect("a copy of a source");
}

/// Folders of copies of the sources, the dialects and the emulator, and of libraries compiled from them.
struct Build {
    compiler: &'static str,
    copies: PathBuf,
    /// Named by the sources: libraries of earlier runs are used again.
    libraries: PathBuf,
}

impl Build {
    /// Copies the sources, the dialects and the emulator, in the same folders; also returns the marked indices.
    fn new() -> (Self, Vec<Site>) {
        let compiler = compiler().unwrap_or_else(|none| panic!("{none}"));
        let folders = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let copies = folders.join(format!("emulated-{}", std::process::id()));
        let mut sites = Vec::new();
        let into = |name: &str| {
            let folder = copies.join(name);
            std::fs::create_dir_all(&folder).expect("a folder for copies of the sources");
            folder
        };
        for source in sources("cpp").iter().chain(&sources("h")) {
            copy(source, &into("shaders"), &mut sites);
        }
        for dialect in Dialect::ALL {
            let (_, name, file) = dialect.headers();
            copy(&folder(name).join(file), &into(name), &mut sites);
        }
        for name in ["machine.h", "machine.cpp", "cuda.h", "metal.h", "faults.cpp", "exponential.cpp"] {
            std::fs::copy(folder("tests/emulator").join(name), into("tests/emulator").join(name)).expect("a copy");
        }
        // With this file, which has the compiler's options.
        let mut hash = DefaultHasher::new();
        (compiler, fused_multiply_add(), include_str!("machine.rs")).hash(&mut hash);
        for folder in ["shaders", "cuda", "metal", "tests/emulator"] {
            let entries = std::fs::read_dir(copies.join(folder)).expect("a folder of copies");
            let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
            paths.sort();
            paths.iter().for_each(|path| std::fs::read(path).expect("a copy").hash(&mut hash));
        }
        let libraries = folders.join(format!("emulated-{:016x}", hash.finish()));
        std::fs::create_dir_all(&libraries).expect("a folder for libraries");
        (Self { compiler, copies, libraries }, sites)
    }

    /// The kernels in a dialect, or the machine; and the file. One library per dialect: their
    /// functions have the same names.
    fn library(&self, dialect: Option<Dialect>, needed: Option<&Path>) -> (Library, PathBuf) {
        let name = dialect.map_or("machine.so".into(), |dialect| format!("{dialect:?}.so"));
        let path = self.libraries.join(&name);
        if !path.exists() {
            let linked = self.copies.join(&name);
            let objects = self.objects(dialect);
            let mut linker = Command::new(self.compiler);
            linker.arg("-shared").args(objects).args(needed).arg("-o").arg(&linked);
            assert!(linker.status().expect("the linker starts").success(), "{name} does not link");
            std::fs::rename(linked, &path).expect("a library");
        }
        // SAFETY: our own code: its constructors set globals of its own at most.
        (unsafe { Library::new(&path) }.expect("the kernels load"), path)
    }

    /// Compiles the sources of a library, two at a time.
    fn objects(&self, dialect: Option<Dialect>) -> Vec<PathBuf> {
        let emulator = self.copies.join("tests/emulator");
        let sources: Vec<_> = match dialect {
            None => vec![emulator.join("machine.cpp")],
            Some(_) => {
                let copied = |path: &PathBuf| self.copies.join("shaders").join(path.file_name().expect("a name"));
                let own = ["faults.cpp", "exponential.cpp"].map(|name| emulator.join(name));
                sources("cpp").iter().map(copied).chain(own).collect()
            }
        };
        let object = |source: &PathBuf| source.with_extension(dialect.map_or("o".into(), |of| format!("{of:?}.o")));
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                let compiled = self.compile(source, dialect, &object(source));
                assert!(compiled, "{} does not compile for {dialect:?}", source.display());
            }
        };
        std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(work))));
        sources.iter().map(object).collect()
    }

    fn compile(&self, source: &Path, dialect: Option<Dialect>, object: &Path) -> bool {
        let mut command = Command::new(self.compiler);
        command.args(["-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w", "-c"]);
        // Metal 3 is C++14.
        command.arg(if dialect == Some(Dialect::Metal) { "-std=c++14" } else { "-std=c++17" });
        if let Some(dialect) = dialect {
            // Sanitizer findings raise a signal, which the machine reports.
            command.args(["-O2", "-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"]);
            command.args(fused_multiply_add());
            command.arg("-include").arg(self.copies.join("tests/emulator").join(dialect.headers().0));
        } else {
            command.arg("-O2");
        }
        command.arg(source).arg("-o").arg(object).status().expect("the compiler starts").success()
    }
}

impl Drop for Build {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.copies);
    }
}

impl Machine {
    /// The only one of the process, because it installs signal handlers; with the dialects of the first call.
    ///
    /// # Panics
    /// If there is no C++ compiler, or compilation fails.
    pub fn get(dialects: &[Dialect]) -> &'static Self {
        static MACHINE: OnceLock<Machine> = OnceLock::new();
        MACHINE.get_or_init(|| {
            let (build, sites) = Build::new();
            let (machine, path) = build.library(None, None);
            let load = |&dialect: &Dialect| (dialect, build.library(Some(dialect), Some(&path)).0);
            Self { machine, kernels: dialects.iter().map(load).collect(), sites }
        })
    }

    /// A session on this thread.
    pub fn session(&self, dialect: Dialect, backwards: bool) -> Session<'_> {
        let session = Session { machine: self, dialect, backwards };
        session.set_mutant(0);
        session
    }

    /// Every marked index of the sources and of a dialect.
    pub fn sites(&self, dialect: Dialect) -> Vec<Site> {
        self.sites.iter().filter(|site| !dialect.lacks(&site.file)).cloned().collect()
    }

    fn function<T>(&self, name: &str) -> Result<libloading::Symbol<'_, T>, String> {
        symbol(&self.machine, name)
    }
}

fn symbol<'a, T>(library: &'a Library, name: &str) -> Result<libloading::Symbol<'a, T>, String> {
    // SAFETY: callers name the types that machine.cpp and `KERNEL` define.
    unsafe { library.get(name.as_bytes()) }.map_err(|_| format!("there is no {name}"))
}

impl Session<'_> {
    /// Makes one index too large by one.
    pub fn mutate(&self, site: &Site) {
        self.set_mutant(site.number);
    }

    fn set_mutant(&self, number: c_int) {
        let mutate = self.machine.function::<unsafe extern "C" fn(c_int)>("machine_mutate").expect("machine.cpp");
        // SAFETY: sets a thread-local integer.
        unsafe { mutate(number) }
    }
}

impl Session<'_> {
    /// `len` bytes, each `0xcd`.
    pub fn allocate(&mut self, len: usize) -> u64 {
        let buffer =
            self.machine.function::<unsafe extern "C" fn(usize) -> *mut u8>("machine_buffer").expect("machine.cpp");
        // SAFETY: the buffer has as many bytes.
        unsafe {
            let at = buffer(len);
            at.write_bytes(0xcd, len);
            at as u64
        }
    }

    /// Frees what `upload` returned, before the session ends.
    #[allow(dead_code)] // the engine's tests do
    pub fn free(&mut self, address: u64) {
        let free =
            self.machine.function::<unsafe extern "C" fn(*const u8)>("machine_free_buffer").expect("machine.cpp");
        // SAFETY: the buffer is unused from here on; other addresses are ignored.
        unsafe { free(address as *const u8) }
    }
}

impl Device for Session<'_> {
    fn upload(&mut self, bytes: &[u8]) -> u64 {
        let at = self.allocate(bytes.len());
        // SAFETY: the buffer is new and has as many bytes.
        unsafe { (at as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        at
    }

    fn download(&mut self, address: u64, bytes: &mut [u8]) {
        // SAFETY: tests pass slices of buffers that `upload` made in this session, of this length.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(address as *const u8, bytes.len()) }
    }

    fn launch(&mut self, launch: Launch<()>, params: &[MaybeUninit<u8>]) -> Result<(), String> {
        let Launch { kernel, grid, threads, shared, .. } = launch;
        // A device's driver refuses these.
        if grid.contains(&0) || threads == 0 {
            return Err(format!("there is no thread in a grid of {grid:?} blocks of {threads}"));
        }
        let mut kernels = self.machine.kernels.iter();
        let (_, kernels) = kernels.find(|(dialect, _)| *dialect == self.dialect).expect("the machine has the dialect");
        let size = symbol::<unsafe extern "C" fn() -> usize>(kernels, &format!("{kernel}_params"))?;
        // SAFETY: `KERNEL` defines it.
        let size = unsafe { size() };
        if size != params.len() {
            return Err(format!("its parameters have {size} bytes, not {}", params.len()));
        }
        if let Ok(of_launch) = symbol::<unsafe extern "C" fn(usize) -> usize>(kernels, &format!("{kernel}_of_launch")) {
            // SAFETY: `KERNEL_LARGE` or `KERNEL_PER_WARP` defines it.
            let needed = unsafe { of_launch(threads as usize / 32) };
            if needed > shared as usize {
                return Err(format!("{shared} bytes of shared memory are stated, and it needs {needed}"));
            }
        }
        type Run = unsafe extern "C" fn(Kernel, *const u32, *const u32, *const c_void, c_int, c_int) -> *const c_char;
        let run = self.machine.function::<Run>("machine_launch")?;
        let kernel = symbol::<Kernel>(kernels, kernel)?;
        let (backwards, flushes) = (self.backwards.into(), (self.dialect == Dialect::Metal).into());
        let block = [threads, 1, 1];
        // SAFETY: the parameters have the size of the kernel's structure; accesses outside the buffers fault, which the
        // machine reports.
        let error = unsafe {
            let error = run(*kernel, grid.as_ptr(), block.as_ptr(), params.as_ptr().cast(), backwards, flushes);
            if error.is_null() { None } else { Some(CStr::from_ptr(error).to_string_lossy().into_owned()) }
        };
        error.map_or(Ok(()), Err)
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if let Ok(free) = self.machine.function::<unsafe extern "C" fn()>("machine_free_buffers") {
            // SAFETY: the session ends, and with it the use of its slices.
            unsafe { free() }
        }
    }
}
