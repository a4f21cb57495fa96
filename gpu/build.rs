//! Feature `cuda`: compiles the CUDA kernels. `cuda-prebuilt`: embeds the committed PTX. `metal`: embeds the Metal
//! sources. Without a feature, it does nothing.

mod joined;

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use joined::joined;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=joined.rs");
    let feature = |name: &str| env::var_os(format!("CARGO_FEATURE_{name}")).is_some();
    let cuda = match (feature("CUDA"), feature("CUDA_PREBUILT")) {
        (true, _) => compiled().and_then(|images| embed(&images)),
        (false, true) => prebuilt().and_then(|images| embed(&images)),
        (false, false) => Ok(()),
    };
    let metal = if feature("METAL") { metal() } else { Ok(()) };
    for problem in [cuda, metal].into_iter().filter_map(Result::err) {
        println!("cargo::error={problem}");
    }
}

/// The dialects, which are included before every source: CUDA C++, Metal Shading Language.
const DIALECTS: [&str; 2] = ["cuda/device.cuh", "metal/device.metal"];

/// The files in `folder` with this extension, sorted.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>, String> {
    println!("cargo::rerun-if-changed={}", folder.display());
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.iter().for_each(|file| println!("cargo::rerun-if-changed={}", file.display()));
    files.retain(|file| file.extension().is_some_and(|found| found == extension));
    files.sort();
    Ok(files)
}

/// One image per source: machine code for compute capabilities 8.0 (A100), 8.9 (L4, RTX 40) and 9.0 (H100, H200), and
/// PTX for others: of 9.0 for later ones, because kernels start early there (`cuda/device.cuh`).
fn compiled() -> Result<Vec<PathBuf>, String> {
    let (nvcc, out) = (nvcc()?, out_dir()?);
    let sources = files(Path::new("shaders"), "cpp")?;
    println!("cargo::rerun-if-changed={}", DIALECTS[0]);
    let image = |source: &PathBuf| out.join(source.with_extension("fatbin").file_name().unwrap_or_default());
    let start = |source: &PathBuf| {
        let mut command = Command::new(&nvcc);
        command.args(["-x", "cu", "-include", DIALECTS[0], "-std=c++17", "-O3", "-fatbin"]);
        command.args(["-gencode", "arch=compute_80,code=[compute_80,sm_80]"]);
        command.args(["-gencode", "arch=compute_89,code=sm_89", "-gencode", "arch=compute_90,code=[compute_90,sm_90]"]);
        let process = command.arg(source).arg("-o").arg(image(source)).stderr(Stdio::piped()).spawn();
        process.map_err(|error| format!("{}: {error}", nvcc.display()))
    };
    let at_once = std::thread::available_parallelism().map_or(1, usize::from);
    for sources in sources.chunks(at_once) {
        let processes = sources.iter().map(start).collect::<Result<Vec<_>, _>>()?;
        for (source, process) in sources.iter().zip(processes) {
            let output = process.wait_with_output().map_err(|error| error.to_string())?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr).replace('\n', " | ");
                return Err(format!("{} does not compile: {said}", source.display()));
            }
        }
    }
    Ok(sources.iter().map(image).collect())
}

/// The first nvcc of `NVCC`, `PATH`, `CUDA_HOME`, `CUDA_PATH` and the toolkit's usual folder.
fn nvcc() -> Result<PathBuf, String> {
    let variables = ["NVCC", "PATH", "CUDA_HOME", "CUDA_PATH"];
    variables.iter().for_each(|name| println!("cargo::rerun-if-env-changed={name}"));
    let toolkit = |name| env::var_os(name).map(|folder| PathBuf::from(folder).join("bin/nvcc"));
    let candidates = [
        env::var_os("NVCC").map(PathBuf::from),
        Some(PathBuf::from("nvcc")),
        toolkit("CUDA_HOME"),
        toolkit("CUDA_PATH"),
        Some(PathBuf::from("/usr/local/cuda/bin/nvcc")),
    ];
    let works =
        |nvcc: &PathBuf| Command::new(nvcc).arg("--version").output().is_ok_and(|output| output.status.success());
    candidates.into_iter().flatten().find(works).ok_or_else(|| {
        "the feature `cuda` compiles its kernels with nvcc, which was not found: set NVCC to the output of \
         `scripts/install_nvcc.sh FOLDER`, install the CUDA toolkit 13, or use the feature `cuda-prebuilt`"
            .into()
    })
}

/// The committed PTX, if it was compiled from these sources.
fn prebuilt() -> Result<Vec<PathBuf>, String> {
    let (shaders, dialect) = (Path::new("shaders"), files(Path::new("cuda"), "cuh")?);
    let sources = [dialect, files(shaders, "cpp")?, files(shaders, "h")?].concat();
    let folder = Path::new("cuda/prebuilt");
    let recorded = fs::read_to_string(folder.join("SOURCES")).unwrap_or_default();
    let digest = digest(&sources)?;
    if recorded.trim() != digest {
        return Err(format!(
            "cuda/prebuilt was compiled from other sources ({}, and these are {digest}): run scripts/prebuild_ptx.sh, or use \
             the feature `cuda`",
            recorded.trim()
        ));
    }
    files(folder, "ptx")
}

/// Embeds one text per source.
fn metal() -> Result<(), String> {
    let dialect = Path::new(DIALECTS[1]);
    files(Path::new("shaders"), "h")?;
    println!("cargo::rerun-if-changed={}", dialect.display());
    let mut table =
        String::from("/// Name and text of every source.\npub(super) static SOURCES: &[(&str, &str)] = &[\n");
    for source in files(Path::new("shaders"), "cpp")? {
        let text = joined(dialect, &source)?;
        let _ = writeln!(table, "    ({:?}, {text:?}),", source.file_stem().unwrap_or_default().to_string_lossy());
    }
    table.push_str("];\n");
    fs::write(out_dir()?.join("sources.rs"), table).map_err(|error| error.to_string())
}

/// FNV-1a over the sources' bytes, without carriage returns.
fn digest(sources: &[PathBuf]) -> Result<String, String> {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for source in sources {
        let text = fs::read(source).map_err(|error| format!("{}: {error}", source.display()))?;
        for byte in text.into_iter().filter(|byte| *byte != b'\r') {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    Ok(format!("{hash:016x}"))
}

/// Writes the table that `src/cuda/images.rs` includes.
fn embed(images: &[PathBuf]) -> Result<(), String> {
    let mut table =
        String::from("/// Name and bytes of every image.\npub(super) static IMAGES: &[(&str, &[u8])] = &[\n");
    for image in images {
        let path = fs::canonicalize(image).map_err(|error| format!("{}: {error}", image.display()))?;
        let name = image.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let _ = writeln!(table, "    ({name:?}, include_bytes!({:?})),", path.display().to_string());
    }
    table.push_str("];\n");
    fs::write(out_dir()?.join("images.rs"), table).map_err(|error| error.to_string())
}

fn out_dir() -> Result<PathBuf, String> {
    env::var_os("OUT_DIR").map(PathBuf::from).ok_or_else(|| "OUT_DIR is not set".into())
}
