#!/bin/sh
# Share of decoding time on the demo pair that is spent outside the kernels, by sampling with perf. Includes loading and the
# prompt, well under 1 %. Other processes affect the speed, not the shares.
#
#     scripts/outside_kernels.sh                      # plain decoding
#     scripts/outside_kernels.sh --draft-block-size 4 # arguments are passed to generate
#
# Needs perf (Debian: apt-get install linux-perf) and kernel.perf_event_paranoid of at most 2.
set -eu
root=$(dirname "$0")/..
command -v perf >/dev/null || { echo "perf is missing; Debian: apt-get install linux-perf" >&2; exit 1; }
cargo build --release --quiet --manifest-path "$root/Cargo.toml" --example generate
generate=${CARGO_TARGET_DIR:-$root/target}/release/examples/generate
samples=$(mktemp)
trap 'rm -f "$samples"' EXIT
[ $# -gt 0 ] || set -- --no-speculation
perf record --quiet --event cpu-clock --freq 1999 --output "$samples" \
    "$generate" --threads 1 --max-tokens 4000 --ignore-eos "$@" >/dev/null
# A standard library symbol that was not inlined is counted by its own kind, not its caller's: the kernels' share is a lower
# bound.
perf report --input "$samples" --no-children --sort dso,symbol --stdio 2>/dev/null | awk '
    $1 !~ /%$/ { next }
    {
        share = $1 + 0
        kind = "other"
        if (/foretoken_kernels::/) kind = "kernels"
        else if ($2 ~ /^\[kernel/ || $2 ~ /^\[unknown/) kind = "operating system"
        else if (/alloc|free|memset|memmove|memcpy|unlink_chunk/) kind = "allocation and copies"
        else if (/candle_|foretoken::nn|foretoken::gemma4/) kind = "tensors and modules"
        else if (/foretoken::kv/) kind = "KV cache"
        else if (/foretoken::speculative|foretoken::sampler/) kind = "planner, drafters and sampling"
        else if (/tokenizers|regex|foretoken::generation|foretoken::tokenizer/) kind = "text"
        sum[kind] += share
        all += share
    }
    END {
        for (kind in sum) printf "%6.2f %%  %s\n", 100 * sum[kind] / all, kind | "sort -rn"
        close("sort -rn")
        printf "%6.2f %%  outside the kernels, excluding the operating system\n", \
            100 * (1 - sum["kernels"] / (all - sum["operating system"]))
    }'
