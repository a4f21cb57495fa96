#!/usr/bin/env bash
# Tests under AddressSanitizer, with debug assertions and overflow checks (the profile `checked`), on the stable toolchain:
#   scripts/sanitize.sh [kernels|engine|all]     all is the default
# kernels: the CPU kernels on every instruction set of this processor. engine: what maps files, reads them, and owns K/V.
# Memory that inline assembly reads or writes (AMX) is outside AddressSanitizer's sight.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "skipped: AddressSanitizer: the script knows x86-64 Linux only" >&2
    exit 0
fi

# The compiler has the sanitizer on stable, behind this variable. A target that is named keeps it out of build scripts.
export RUSTC_BOOTSTRAP=1
export RUSTFLAGS="${RUSTFLAGS:-} -Zsanitizer=address"
sanitized() {
    echo "== cargo test $*"
    cargo test --profile checked --target x86_64-unknown-linux-gnu --target-dir target/sanitize "$@"
}

kernels() {
    sanitized -p foretoken-kernels --lib --test kernels --test quant --test turbo --test turbo_golden
}

engine() {
    sanitized --lib --test bad_input --test gguf --test convert --test kv_round --test kv_formats --test session_file
}

case "${1:-all}" in
    kernels) kernels ;;
    engine) engine ;;
    all)
        kernels
        engine
        ;;
    *)
        echo "usage: scripts/sanitize.sh [kernels|engine|all]" >&2
        exit 2
        ;;
esac
