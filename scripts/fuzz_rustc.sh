#!/usr/bin/env bash
# rustc wrapper for scripts/fuzz.sh: instruments the engine and the crates that parse its files and grammars, but not build-time
# code, nor the compute crates: those would take most of an hour to compile, and read mapped files, whose bounds AddressSanitizer
# does not know.
set -eu
case "${CARGO_PKG_NAME:-} $*" in
    *build_script_* | *proc-macro*) ;;
    foretoken\ * | foretoken-fuzz\ * | safetensors\ * | tokenizers\ * | minijinja* | serde_json\ * | llguidance\ * | \
        toktrie\ * | derivre\ *)
        export RUSTC_BOOTSTRAP=1
        set -- "$@" -Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
            -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
            -Cllvm-args=-sanitizer-coverage-trace-compares
        ;;
esac
exec "$@"
