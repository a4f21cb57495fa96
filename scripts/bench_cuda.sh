#!/usr/bin/env bash
# Checks and times everything on a CUDA device: the kernels, and the engine with checkpoints of real shapes.
#
#   scripts/bench_cuda.sh                builds, then runs
#   scripts/bench_cuda.sh build FOLDER   builds executables into FOLDER, for a machine without Rust
#   scripts/bench_cuda.sh run FOLDER     runs them: `check`, then `speed`, then `engine`
#   scripts/bench_cuda.sh check FOLDER   the kernels' and the engine's tests, also under compute-sanitizer if it is installed
#   scripts/bench_cuda.sh speed FOLDER   the kernels' times
#   scripts/bench_cuda.sh engine FOLDER  the engine's times, against the targets
#
# DEVICE (cuda), VARIANTS (e2b e4b 26b), TYPES (q4_k q8_0), DEPTHS (0,32768,131072), TOKENS (256) and REPEATS (7) choose what
# `engine` measures. SYNTHESIZE has additional options for its checkpoints, which exist one at a time (27 GB at most).
# DEVICE=cpu VARIANTS=e2b DEPTHS=0,256 SYNTHESIZE="--layers 6 --vocab 4096" runs anywhere, to try the script.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-all} folder=${2:-target/cuda-bench}
device=${DEVICE:-cuda}

build() {
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
    for example in synthesize verify_curve depth generate; do executable "$example" build --example "$example"; done
}

check() {
    "$folder/suite" --nocapture
    "$folder/engine" --nocapture
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            compute-sanitizer --error-exitcode 1 --tool "$tool" "$folder/suite" kernels_agree
            compute-sanitizer --error-exitcode 1 --tool "$tool" "$folder/engine" the_text_is_the_cpus
        done
    fi
}

met=0 asked=0
target() { # WHAT VALUE RELATION LIMIT
    asked=$((asked + 1))
    if awk "BEGIN { exit !($2 $3 $4) }"; then met=$((met + 1)); echo "met:    $1: $2 $3 $4"; else echo "MISSED: $1: $2, required $3 $4"; fi
}

engine() {
    mkdir -p "$folder/echo"
    for variant in ${VARIANTS:-e2b e4b 26b}; do
        for type in ${TYPES:-q4_k q8_0}; do pair "$variant" "$type"; done
    done
    echo "$met of $asked targets met"
}

pair() { # VARIANT TYPE
    local name="$1 $2" at="$folder/echo" centroids=() out tokens
    printf '\n== %s\n' "$name"
    if [ "$1" != 26b ]; then centroids=(--centroids); fi
    # shellcheck disable=SC2086
    "$folder/synthesize" "$at" "$1" --quantize "$2" "${centroids[@]}" ${SYNTHESIZE:-}
    local models=(--model "$at/$1-target.gguf" --device "$device")
    local both=("${models[@]}" --assistant "$at/$1-assistant.gguf")

    out=$("$folder/verify_curve" "${both[@]}" --repeats "${REPEATS:-7}")
    echo "$out"
    if [ "$name" = "e4b q8_0" ]; then
        target "$name: % of the bandwidth, one row" "$(awk '$1 == "1" { print $5 }' <<<"$out")" ">=" 60
    fi
    target "$name: v(4)" "$(awk '$1 == "4" { print $3 }' <<<"$out")" "<=" 1.15

    tokens=${TOKENS:-256}
    rate() { # GENERATE'S ARGUMENTS: tokens per second
        "$folder/generate" "${both[@]}" --prompt-ids 400,500,600,700 --ignore-eos --max-tokens "$tokens" --context 4096 --json "$@" 2>/dev/null |
            sed -n 's/.*"decode_tokens_per_second":\([0-9.eE+-]*\).*/\1/p'
    }
    local plain all some
    plain=$(rate --no-speculation)
    all=$(rate --draft-block-size 4 --simulate-acceptance 1)
    some=$(rate --draft-block-size 4 --simulate-acceptance 0.7)
    echo "decode $plain tokens/s; MTP with B = 4: $some at an acceptance of 0.7, $all if all drafts are accepted"
    target "$name: a round of four tokens, relative to a step" "$(awk "BEGIN { print 4 * $plain / $all }")" "<" 1.3

    out=$("$folder/depth" "${models[@]}" --depths "${DEPTHS:-0,32768,131072}" --kv f16,turbo3,balanced --repeats "${REPEATS:-7}")
    echo "$out"
    # The last depth is the deepest.
    target "$name: balanced KV cache at depth, ms per step" \
        "$(awk '$2 == "balanced" { ms = $3 } END { print ms }' <<<"$out")" "<=" \
        "$(awk '$2 == "f16" { ms = $3 } END { print ms }' <<<"$out")"
    rm -f "$at/$1-target.gguf" "$at/$1-assistant.gguf"
}

case $what in
all) build; check; "$folder/speed"; engine ;;
run) check; "$folder/speed"; engine ;;
speed) "$folder/speed" ;;
build | check | engine) "$what" ;;
*) echo "usage: $0 [build|run|check|speed|engine [FOLDER]]" >&2 && exit 2 ;;
esac
