//! Which instruction sets the other tests run: all that this processor has.

mod skipped;

use foretoken_kernels::Isa;

/// Every instruction set of this architecture that has kernels, the narrowest first.
const ALL: &[&str] = if cfg!(target_arch = "x86_64") {
    &["scalar", "avx2", "avx-vnni", "avx512", "amx"]
} else if cfg!(target_arch = "aarch64") {
    &["scalar", "neon", "neon-dotprod", "neon-i8mm"]
} else {
    &["scalar"]
};

#[test]
fn instruction_sets_of_this_processor() {
    let ran: Vec<_> = Isa::available().map(Isa::name).collect();
    skipped::print(&format!("ran: isa {}", ran.join(", ")));
    ALL.iter().filter(|name| !ran.contains(name)).for_each(|name| {
        skipped::skipped(&format!("isa {name}"), "not supported by this processor");
    });
    let known: Vec<_> = ALL.iter().copied().filter(|name| ran.contains(name)).collect();
    assert_eq!(ran, known, "known, each once, the widest last");
    assert_eq!(Isa::best().name(), ran[ran.len() - 1]);
}
