#!/usr/bin/env bash
# rustc as scripts/fuzz.sh has cargo call it: the engine and the crates that parse its files are instrumented, not what runs
# at build time, nor the crates that compute: they take most of an hour to compile so, and read mapped files, whose bounds
# AddressSanitizer does not know.
set -eu
case "${CARGO_PKG_NAME:-} $*" in
    *build_script_* | *proc-macro*) ;;
    foretoken\ * | foretoken-fuzz\ * | safetensors\ * | tokenizers\ * | minijinja* | serde_json\ *)
        export RUSTC_BOOTSTRAP=1
        set -- "$@" -Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
            -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
            -Cllvm-args=-sanitizer-coverage-trace-compares
        ;;
esac
exec "$@"
