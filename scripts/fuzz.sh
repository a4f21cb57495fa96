#!/usr/bin/env bash
# Fuzzes all readers of external files and grammars with AddressSanitizer, on the stable toolchain.
#
#   scripts/fuzz.sh MINUTES [TARGET...]   each target for MINUTES, one after the other
#   scripts/fuzz.sh --smoke [TARGET...]   17 seconds each, two minutes in all
#   scripts/fuzz.sh --build               only build
#
# Requires Rust 1.94, Linux on x86-64 or aarch64 and a C++ compiler. Starts from fuzz/seeds/TARGET; the corpus grows in
# target/fuzz/corpus/TARGET and is reused by later runs. A failing input is written to target/fuzz/artifacts/TARGET, and the exit code
# is 1; reproduce it with target/fuzz/release/TARGET INPUT.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" >&2; exit 2; }
case ${1:-} in
    --smoke) seconds=17 ;;
    --build) seconds=0 ;;
    '' | *[!0-9]*) usage ;;
    *) seconds=$((60 * $1)) ;;
esac
shift
if [ $# = 0 ]; then set -- gguf safetensors tokenizer chat_template session_file config constraint; fi
for target; do [ -d "fuzz/seeds/$target" ] || { echo "no target $target; targets: $(ls fuzz/seeds | xargs)" >&2; exit 2; }; done

RUSTC_WRAPPER="$PWD/scripts/fuzz_rustc.sh" \
    cargo build --release --locked --target-dir target/fuzz --manifest-path fuzz/Cargo.toml

# Leaks would show up as exhausted memory; symbols come from the panic message or a debugger.
export ASAN_OPTIONS=detect_leaks=0:symbolize=0
failed=()
[ "$seconds" = 0 ] && set --
for target; do
    corpus=target/fuzz/corpus/$target artifacts=target/fuzz/artifacts/$target log=target/fuzz/$target.log
    mkdir -p "$corpus" "$artifacts"
    status=0
    # An allocation of more than 64 MiB means an unchecked length: the largest input has 64 KiB.
    "target/fuzz/release/$target" "$corpus" "fuzz/seeds/$target" -seed=1 -max_len=65536 -timeout=20 \
        -rss_limit_mb=2048 -malloc_limit_mb=64 -max_total_time="$seconds" -print_final_stats=1 \
        -artifact_prefix="$artifacts/" >"$log" 2>&1 || status=$?
    figure() { sed -n "s/^stat::$1: *//p" "$log"; }
    coverage=$(sed -n 's/.* \(cov: [0-9]* ft: [0-9]* corp: [0-9]*\)\/.*/\1/p' "$log" | tail -n 1)
    echo "$target: runs: $(figure number_of_executed_units) exec/s: $(figure average_exec_per_sec)" \
        "$coverage peak: $(figure peak_rss_mb) MiB crashes: $((status != 0))"
    if [ "$status" != 0 ]; then
        failed+=("$target")
        grep -m 1 -A 1 -E "panicked|ERROR: |libFuzzer: " "$log" || tail -n 5 "$log"
        sed -n 's/.*Test unit written to /  input: /p' "$log"
    fi
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
