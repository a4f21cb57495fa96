#!/usr/bin/env bash
# Checks and times everything on a CUDA device: the kernels, and the engine with checkpoints of real shapes.
#
#   scripts/bench_cuda.sh                builds, then runs
#   scripts/bench_cuda.sh build FOLDER   builds executables into FOLDER, for a machine without Rust
#   scripts/bench_cuda.sh run FOLDER     runs them: `check`, then `speed`, then `engine`
#   scripts/bench_cuda.sh check FOLDER   the tests of the kernels and of the engine, then under compute-sanitizer if it is installed
#   scripts/bench_cuda.sh speed FOLDER   the kernels' times
#   scripts/bench_cuda.sh engine FOLDER  the engine's times, against the targets
#
# Every stage has a time limit (LIMIT, 600 seconds) and goes on after a failure of another; output is also appended to
# FOLDER/results.txt. DEVICE (cuda), VARIANTS (e2b e4b 26b), TYPES (q4_k_m q8_0), MEASURE (curve rates many depth), DEPTHS
# (0,32768,131068), SEQUENCES (1,4,16), TOKENS (256) and REPEATS (7) choose what `engine` measures. SYNTHESIZE has additional options for its
# checkpoints, which are written to ECHO (FOLDER/echo) and removed, unless they existed (27 GB at most).
# DEVICE=cpu VARIANTS=e2b DEPTHS=0,256 SYNTHESIZE="--layers 6 --vocab 4096" runs anywhere, to try the script.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
what=${1:-all} folder=${2:-target/cuda-bench}
device=${DEVICE:-cuda} echo_folder=${ECHO:-$folder/echo}
failed=()

build() (
    set -e
    NVCC=${NVCC:-$(command -v nvcc || scripts/install_nvcc.sh target/nvcc)}
    export NVCC
    mkdir -p "$folder"
    executable() { # NAME CARGO'S ARGUMENTS: the last executable of cargo's messages is NAME's
        local built
        built=$(cargo "${@:2}" --release --features cuda --message-format json |
            sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
        cp "$built" "$folder/$1"
    }
    executable suite test -p foretoken-gpu --no-run --test cuda
    executable speed build -p foretoken-gpu --example cuda_speed
    executable engine test --no-run --test cuda
    executable emulated test --features emulated-device --no-run --test device_emulated
    for example in synthesize verify_curve depth generate batch; do executable "$example" build --example "$example"; done
)

limited() { timeout "${LIMIT:-600}" "$@"; }

remember() { # NAME: of what has failed
    echo "FAILED: $1: status $?"
    failed+=("$1")
}

stage() { # NAME COMMAND: prints its output, and remembers a failure
    printf '\n== %s\n' "$1"
    limited "${@:2}" 2>&1 || remember "$1"
}

check() {
    stage "kernels" "$folder/suite" --test-threads 1 --nocapture
    stage "engine" "$folder/engine" --test-threads 1 --nocapture
    # The emulated device's tests: their fixtures are where they were built.
    local emulated=(env FORETOKEN_TEST_DEVICE=cuda "$folder/emulated" --test-threads 4)
    stage "engine, emulated" "${emulated[@]}" --skip device_sequences::
    stage "engine, sequences" "${emulated[@]}" device_sequences::
    command -v compute-sanitizer >/dev/null || { echo "skipped: compute-sanitizer is not installed" && return; }
    # A kernel is looked up in one image after the other: calls that do not find it are no errors.
    local sanitizer=(compute-sanitizer --error-exitcode 1 --report-api-errors no)
    for tool in memcheck synccheck; do
        stage "kernels, $tool" "${sanitizer[@]}" --tool "$tool" "$folder/suite" --test-threads 1 kernels_agree
    done
    # The cases that reach every line: all of them did not end in 75 seconds.
    stage "kernels, racecheck" "${sanitizer[@]}" --tool racecheck "$folder/suite" --test-threads 1 small_cases
    stage "engine, memcheck" "${sanitizer[@]}" --tool memcheck "$folder/engine" --test-threads 1 the_text
}

speed() { stage "speed" "$folder/speed"; }

met=0 asked=0
target() { # WHAT VALUE RELATION LIMIT
    asked=$((asked + 1))
    if awk "BEGIN { exit !($2 $3 $4) }"; then met=$((met + 1)); echo "met:    $1: $2 $3 $4"; else echo "MISSED: $1: $2, required $3 $4"; fi
}

engine() {
    mkdir -p "$echo_folder"
    for variant in ${VARIANTS:-e2b e4b 26b}; do
        for type in ${TYPES:-q4_k_m q8_0}; do pair "$variant" "$type"; done
    done
    echo "$met of $asked targets met"
}

pair() { # VARIANT TYPE
    local name="$1 $2" centroids=() out tokens=${TOKENS:-256} made=
    printf '\n== %s\n' "$name"
    case $1 in e2b | e4b) centroids=(--centroids) ;; esac
    local files=("$echo_folder/$1-target.gguf" "$echo_folder/$1-assistant.gguf")
    if [ ! -e "${files[0]}" ]; then
        made=1
        # shellcheck disable=SC2086
        "$folder/synthesize" "$echo_folder" "$1" --quantize "$2" "${centroids[@]}" --key-norm 0.125 ${SYNTHESIZE:-} >/dev/null ||
            { remember "$name: synthesize" && rm -f "${files[@]}" && return; }
    fi
    local models=(--model "${files[0]}" --device "$device")
    local both=("${models[@]}" --assistant "${files[1]}")
    for part in ${MEASURE:-curve rates many depth}; do "$part"; done
    if [ -n "$made" ]; then rm -f "${files[@]}"; fi
}

curve() {
    for depth in 64 512; do
        out=$(limited "$folder/verify_curve" "${both[@]}" --repeats "${REPEATS:-7}" --depth "$depth" 2>&1) ||
            remember "$name: verify_curve at depth $depth"
        echo "$out"
        # The first line may begin with a number of threads.
        target "$name: depth $depth: % of the bandwidth, one row" "$(awk '$1 == 1 && $2 + 0 { print $5 }' <<<"$out")" ">=" 60
        target "$name: depth $depth: v(4)" "$(awk '$1 == 4 && $2 + 0 { print $3 }' <<<"$out")" "<=" 1.15
    done
}

rates() {
    rate() { # GENERATE'S ARGUMENTS: tokens per second
        limited "$folder/generate" "${both[@]}" --prompt-ids 400,500,600,700 --ignore-eos --max-tokens "$tokens" \
            --context 4096 --json "$@" 2>/dev/null | sed -n 's/.*"decode_tokens_per_second":\([0-9.eE+-]*\).*/\1/p'
    }
    local plain all some
    plain=$(rate --no-speculation) || remember "$name: plain decoding"
    all=$(rate --draft-block-size 4 --simulate-acceptance 1) || remember "$name: rounds of which all drafts are accepted"
    some=$(rate --draft-block-size 4 --simulate-acceptance 0.7) || remember "$name: rounds at an acceptance of 0.7"
    echo "decode $plain tokens/s; MTP with B = 4: $some at an acceptance of 0.7, $all if all drafts are accepted"
    target "$name: a round of four tokens, relative to a step" "$(awk "BEGIN { print 4 * $plain / $all }")" "<=" 1.3
}

many() {
    stage "$name: batches" "$folder/batch" "${both[@]}" --measure 3 --sequences "${SEQUENCES:-1,4,16}" --prompt-tokens 64 \
        --ignore-eos --max-tokens "$tokens" --context 4096 --no-speculation
}

depth() {
    out=$(limited "$folder/depth" "${models[@]}" --depths "${DEPTHS:-0,32768,131068}" --kv f16,turbo3,balanced \
        --repeats "${REPEATS:-7}" 2>&1) || remember "$name: depths"
    echo "$out"
    # The last depth is the deepest.
    target "$name: balanced KV cache at depth, ms per step" \
        "$(awk '$2 == "balanced" { ms = $3 } END { print ms }' <<<"$out")" "<=" \
        "$(awk '$2 == "f16" { ms = $3 } END { print ms }' <<<"$out")"
}

run() { # STAGES
    mkdir -p "$folder"
    {
        nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit --format=csv 2>/dev/null
        for part in "$@"; do "$part"; done
        if [ ${#failed[@]} -gt 0 ]; then printf 'FAILED: %s\n' "${failed[@]}" && exit 1; fi
    } | tee -a "$folder/results.txt"
}

case $what in
all)
    build # not `build && run`, in which its `set -e` has no effect
    [ $? = 0 ] && run check speed engine
    ;;
run) run check speed engine ;;
build) build ;;
check | speed | engine) run "$what" ;;
*) echo "usage: $0 [build|run|check|speed|engine [FOLDER]]" >&2 && exit 2 ;;
esac
