#!/bin/sh
# Benchmarks a Gemma 4 variant with the checkpoints found in a folder, or with full-size ones synthesized there.
#
#     scripts/bench_matrix.sh e2b models/real          #  3 GB if synthesized
#     scripts/bench_matrix.sh e4b models/real          #  5 GB
#     scripts/bench_matrix.sh 12b models/real          #  7 GB
#     scripts/bench_matrix.sh 26b models/real          # 18 GB
#     scripts/bench_matrix.sh 31b models/real          # 19 GB
#
# Arguments after the folder are passed to bench_matrix, after the variant's defaults:
#
#     scripts/bench_matrix.sh e2b models/real --threads 1 --runs 3 --llama-server path/to/llama-server
set -eu

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
[ $# -ge 2 ] || usage
variant=$1 folder=$2
shift 2

# Deep prompts are read once per KV cache format, which takes an hour for the large variants; use --prompts for more.
case $variant in
    e2b | e4b) prompts=short,long,4k,16k,32k ;;
    12b | 26b | 31b) prompts=short,long,4k ;;
    *) echo "$variant: is not a variant; use e2b, e4b, 12b, 26b or 31b" >&2; exit 2 ;;
esac
root=$(dirname "$0")/..
case " $* " in *" --prompts"*) ;; *) set -- --prompts "$prompts" "$@" ;; esac
case " $* " in *" --out"*) ;; *) set -- --out "$root/target/bench_matrix/$variant" "$@" ;; esac
example() {
    name=$1
    shift
    cargo run --release --quiet --manifest-path "$root/Cargo.toml" --example "$name" -- "$@"
}

# The first checkpoint of the variant, a GGUF file or a directory with config.json, that is an assistant or (-v) is not.
find_checkpoint() {
    (cd "$folder" 2>/dev/null && find . -maxdepth 2 \( -iname "*$variant*.gguf" -o -ipath "*$variant*/config.json" \)) |
        sed 's,/config\.json$,,; s,^\./,,' | grep -iv mmproj | grep -i "$@" 'assistant[^/]*$' | LC_ALL=C sort | head -n 1
}

model=$(find_checkpoint -v) assistant=$(find_checkpoint)
model=${model:+$folder/$model} assistant=${assistant:+$folder/$assistant}
if [ -z "$model" ] && [ -z "$assistant" ]; then
    echo "$folder: no checkpoint of $variant; synthesizing a pair whose drafts are always accepted" >&2
    example synthesize "$folder" "$variant"
    model=$folder/$variant-target.gguf assistant=$folder/$variant-assistant.gguf
fi
if [ -z "$model" ] || [ -z "$assistant" ]; then
    echo "$folder: only ${model:-$assistant} found for $variant; put the other checkpoint of the pair next to it" >&2
    exit 1
fi
example bench_matrix --model "$model" --assistant "$assistant" "$@"
