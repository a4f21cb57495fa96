#!/usr/bin/env bash
# Tests under AddressSanitizer, on the stable toolchain:
#   scripts/sanitize.sh [kernels|engine|assertions|all]     all is the default
# kernels: the CPU kernels on every instruction set of this processor. engine: code that maps and reads files and owns the KV cache,
# with debug assertions and overflow checks (the profile `checked`). assertions: those in the kernels, without AddressSanitizer.
# AddressSanitizer does not see memory accesses of inline assembly (AMX).
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "skipped: AddressSanitizer: only x86-64 Linux is supported" >&2
    exit 0
fi

# RUSTC_BOOTSTRAP enables the sanitizer on stable. An explicit --target keeps it out of build scripts. Checks are calls: inlined,
# the kernels' thousands of loads would take more than an hour to compile.
sanitized() {
    echo "== AddressSanitizer: cargo test $*"
    RUSTC_BOOTSTRAP=1 RUSTFLAGS="${RUSTFLAGS:-} -Zsanitizer=address -Cllvm-args=-asan-instrumentation-with-call-threshold=0" \
        cargo test --locked --profile checked --target x86_64-unknown-linux-gnu --target-dir target/sanitize "$@"
}

tests=(-p foretoken-kernels --lib --test kernels --test quant --test turbo --test turbo_golden --test delta_net)

kernels() {
    sanitized "${tests[@]}"
}

engine() {
    # Without the tests of the commands, which are not built here, those of K = V, and two tests that take more than 45 minutes each:
    # texts with every KV cache format, and of eight turns. Rounds and forks in the other tests cover the same code.
    sanitized --lib --test bad_input --test gguf --test convert --test prefix_cache -- \
        --skip arguments_that_are_not_utf_8 --skip the_command_line --skip usage --skip an_agents_turns_compute_what_is_new
    # By itself: the library's own tests of K = V have the name of these as well.
    sanitized --test kv -- --skip k_eq_v:: --skip text_is_the_same_with_speculation
}

assertions() {
    local checks=profile.checked.package.foretoken-kernels
    echo "== debug assertions and overflow checks: cargo test ${tests[*]}"
    cargo test --locked --profile checked --config "$checks.debug-assertions=true" --config "$checks.overflow-checks=true" \
        --target-dir target/sanitize "${tests[@]}"
}

case "${1:-all}" in
    kernels) kernels ;;
    engine) engine ;;
    assertions) assertions ;;
    all)
        kernels
        engine
        assertions
        ;;
    *)
        echo "usage: scripts/sanitize.sh [kernels|engine|assertions|all]" >&2
        exit 2
        ;;
esac
