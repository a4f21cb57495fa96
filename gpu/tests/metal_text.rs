//! The texts compiled on a Mac, checked by clang's C++ for OpenCL, which has Metal's address spaces, vectors and lack
//! of doubles, with declarations of what the texts use of `metal_stdlib` (`metal_stub`).
//!
//! It does not show that Apple's compiler accepts them. Needs clang; skipped without it.

#[path = "../joined.rs"]
mod joined;
#[path = "../../kernels/tests/skipped/mod.rs"]
mod skipped;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use joined::joined;
use skipped::skipped;

/// Names and texts.
fn texts() -> Vec<(String, String)> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let entries = std::fs::read_dir(package.join("shaders")).expect("gpu/shaders");
    let mut sources: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "cpp"));
    sources.sort();
    let dialect = package.join("metal/device.metal");
    let text = |source: &PathBuf| joined(&dialect, source).expect("a text");
    let name = |source: &PathBuf| source.file_name().expect("a name").to_string_lossy().into_owned();
    sources.iter().map(|source| (name(source), text(source))).collect()
}

/// Clang's diagnostics for a text; `None` without clang.
fn errors(text: &str) -> Option<String> {
    let mut command = Command::new("clang");
    command.args(["-x", "clcpp", "-cl-std=clc++2021", "-target", "spir64", "-cl-no-stdinc", "-fsyntax-only"]);
    // OpenCL has doubles. Metal's own pragmas and attributes.
    command.args([
        "-Ddouble=there_is_no_double_in_metal",
        "-Wno-unknown-pragmas",
        "-Wno-unknown-attributes",
        "-ferror-limit=0",
        "-I",
    ]);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/metal_stub")).arg("-");
    let mut clang = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().ok()?;
    // Shared memory is declared in kernels alone, and OpenCL's are a keyword's.
    let text = text.replace("[[kernel, max_total_threads_per_threadgroup(threads)]]", "__kernel");
    clang.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("clang reads");
    Some(String::from_utf8_lossy(&clang.wait_with_output().expect("clang ends").stderr).into_owned())
}

/// Whether there is a clang with C++ for OpenCL.
fn has_clang() -> bool {
    let works = errors("kernel void f() {}").is_some_and(|said| said.is_empty());
    if !works {
        skipped("the texts for Metal", "there is no clang 14 or newer (Debian: apt-get install clang)");
    }
    works
}

#[test]
fn the_texts_compile() {
    if !has_clang() {
        return;
    }
    let said: Vec<_> = texts().iter().map(|(name, text)| (name.clone(), errors(text).expect("clang"))).collect();
    let problems: Vec<_> = said.iter().filter(|(_, said)| !said.is_empty()).collect();
    assert!(problems.is_empty(), "{problems:#?}");
}

/// A text with a mistake does not compile.
#[test]
fn mistakes_are_noticed() {
    if !has_clang() {
        return;
    }
    let texts = texts();
    let (_, text) = texts.iter().find(|(name, _)| name == "norm.cpp").expect("norm.cpp");
    for (what, mistake) in [
        ("address spaces are mixed", "INLINE float wrong(device float* x) { threadgroup float* y = x; return *y; }"),
        (
            "a structure of parameters is written",
            "struct W { int x; }; INLINE void wrong(const constant W& w) { w.x = 1; }",
        ),
        ("a double", "INLINE float wrong(float x) { double y = x; return y; }"),
        ("a function that Metal lacks", "INLINE float wrong(float x) { return fmodf(x, 2); }"),
        ("shared memory outside of a kernel", "INLINE void wrong() { threadgroup float x; x = 1; }"),
        ("a shuffle of 64 bits", "INLINE u64 wrong(u64 x) { return simd_shuffle(x, ushort(1)); }"),
        ("a stage as a name", "INLINE void fragment() {}"),
        ("a stage as a member", "struct W { int vertex; };"),
        ("an address space as a name", "INLINE int wrong(int threadgroup) { return threadgroup; }"),
        ("a reserved type as a member", "struct W { int f() { return quad; } int quad; };"),
        ("a type that the texts do not use as a name", "INLINE float wrong(float bfloat) { return bfloat; }"),
        (
            "a kernel that writes its parameters",
            "struct Q { int x; }; KERNEL(wrong, Q, 32, 1, None) { p.x = self.lane; }",
        ),
    ] {
        assert!(!errors(&format!("{text}{mistake}\n")).expect("clang").is_empty(), "{what}");
    }
}

/// Pointers and references whose address space is not written, which clang's C++ for OpenCL has a
/// default for, and Metal not: the declarations' text.
fn unqualified(text: &str) -> Vec<String> {
    const SPACES: [&str; 8] =
        ["device", "constant", "threadgroup", "thread", "DEVICE", "CONSTANT", "THREADGROUP", "THREAD"];
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let mut found = Vec::new();
    for line in text.lines().map(|line| line.split("//").next().unwrap_or_default()) {
        let bytes = line.as_bytes();
        let at = |i: usize| bytes.get(i).copied().unwrap_or(b' ');
        for i in (1..bytes.len()).filter(|i| matches!(bytes[*i], b'*' | b'&')) {
            // A sign that is attached to a type: operators are between spaces or before an operand.
            let of_type = (is_word(at(i - 1)) || at(i - 1) == b'>') && !is_word(at(i + 1)) && at(i + 1) != b'=';
            let of_array = at(i - 1) == b'(' && is_word(at(i + 1)) && line[i..].contains(")[");
            let operator = line[..i].ends_with("operator") || at(i - 1) == at(i) || at(i + 1) == at(i);
            if !(of_type || of_array) || operator {
                continue;
            }
            let mut end = if of_array { i - 1 } else { i };
            // Before a template's arguments.
            let mut depth = 0;
            while at(end - 1) == b'>' || depth > 0 {
                end -= 1;
                depth += match bytes[end] {
                    b'>' => 1,
                    b'<' => -1,
                    _ => 0,
                };
                if end == 0 {
                    break;
                }
            }
            let start = line[..end].rfind(['(', ',', ';', '{', '}', '<']).map_or(0, |start| start + 1);
            let words = || line[start..end].split(|c: char| !(c.is_alphanumeric() || c == '_'));
            if !words().any(|word| SPACES.contains(&word)) {
                found.push(line.trim().into());
            }
        }
    }
    found
}

#[test]
fn pointers_name_their_address_space() {
    for (name, text) in texts() {
        let found = unqualified(&text);
        assert!(found.is_empty(), "{name}: {found:#?}");
    }
    for wrong in [
        "INLINE float f(const float* x) {",
        "void f(Params& p, DEVICE int* x) {",
        "INLINE void f(float (&x)[4]) {",
        "float* y = p.y;",
        "x = *reinterpret_cast<const uint2*>(at);",
        "template <class E> INLINE void f(const typename E::Bits* at) {",
    ] {
        assert_eq!(unqualified(wrong).len(), 1, "{wrong}");
    }
    for right in [
        "y = a * b & 3;",
        "x = *at + *(y);",
        "INLINE void f(THREAD Row<HD, 2>& row) {",
        "if (a && b) *x *= 2;",
        "Wide operator*(Wide a, Wide b) {",
    ] {
        assert_eq!(unqualified(right), [""; 0], "{right}");
    }
}
