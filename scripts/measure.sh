#!/usr/bin/env bash
# Measures the figures in README.md with one thread, and writes the raw files that scripts/readme_figures.sh reads.
#
#     scripts/measure.sh OUT_DIR [--ik BIN_DIR] [--llama BIN_DIR] [--work DIR] [--isa NAME] [--name TEXT] [--tiny] [STAGE...]
#
#     --ik BIN_DIR     directory of ik_llama.cpp's llama-bench, llama-batched-bench and llama-server
#     --llama BIN_DIR  directory of those of llama.cpp
#     --work DIR       directory of the E2B pair, which is synthesized if missing (3 GB); default: target/measure
#     --isa NAME       instruction set for foretoken; default: the best. Other engines use what they were built for
#     --name TEXT      name of the machine in README.md; default: processor and instruction set
#     --tiny           a pair of seven layers, in tiny/ of the pair's directory, and single runs, to try the script
#
# Stages, by default all, in this order (about 23 minutes); files in OUT_DIR are not measured again, so an interrupted run can be
# resumed:
#
#     machine      machine.txt: processor, instruction set, bandwidth, versions and build flags
#     demo         demo-matrix.csv: the demo pair
#     e2b          e2b-matrix.csv: the E2B pair, every draft accepted, in turn with llama.cpp's server
#     acceptance   e2b-acceptance-*.csv: the E2B pair with drafts accepted at given rates
#     ik           e2b-ik-matrix.csv: the E2B pair in turn with ik_llama.cpp's server
#     passes       e2b-verify-curve-*.json and e2b-{ik,llama}-{batched-*.txt,bench-*.json}: 1 to 16 rows in one pass, prompts of 512, in turn
#     depth        e2b-depth.json: steps deep in a context
#     depth-peers  e2b-{ik,llama}-depth.json: steps of the other engines after 4096 positions
#     codes        kv-quality-synthetic.txt: quantization errors on synthetic keys, independent of the machine
#
# OUT_DIR/commands.txt has the command of every file. Nothing else should run at the same time.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
usage() {
    sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//p}' "$0" >&2
    exit 2
}
[ $# -ge 1 ] || usage
case $1 in -*) usage ;; esac
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
ik='' llama='' work=$root/target/measure name='' tiny=''
ours=(--threads 1)
stages=()
while [ $# -gt 0 ]; do
    case $1 in
        --ik) ik=$(cd "$2" && pwd); shift 2 ;;
        --llama) llama=$(cd "$2" && pwd); shift 2 ;;
        --work) work=$2; shift 2 ;;
        --isa) ours+=(--isa "$2"); shift 2 ;;
        --name) name=$2; shift 2 ;;
        --tiny) tiny=yes; shift ;;
        machine | demo | e2b | ik | acceptance | passes | depth | depth-peers | codes) stages+=("$1"); shift ;;
        *) usage ;;
    esac
done
[ ${#stages[@]} -gt 0 ] || stages=(machine demo e2b acceptance ik passes depth depth-peers codes)

if [ -n "$tiny" ]; then
    work=$work/tiny pair=(--layers 7 --vocab 4096) tokens=16 long=16 runs=1 repeats=1 depths=64,128 peer_depth=64 prompt=32
else
    pair=() tokens=64 long=192 runs=3 repeats=5 depths=4096,32768 peer_depth=4096 prompt=512
fi

# Everything runs from the directory of the pair, with paths that are the same on any machine.
mkdir -p "$work"
cd "$work"
[ -z "$ik" ] || ln -sfn "$ik" ik_llama.cpp
[ -z "$llama" ] || ln -sfn "$llama" llama.cpp
examples=${CARGO_TARGET_DIR:-$root/target}/release/examples
cargo build --release --quiet --manifest-path "$root/Cargo.toml" \
    --example bench_matrix --example verify_curve --example depth --example kv_quality --example synthesize

failed=()

step() { printf '\n== %s %s\n' "$(date -u +%H:%M:%S)" "$*" >&2; }

# The words of a command, quoted where a shell needs it.
words() {
    local word
    for word in "$@"; do
        case $word in *[[:space:]\&\;\<\>\(\)\|]* | '') printf "'%s' " "$word" ;; *) printf '%s ' "$word" ;; esac
    done
}

note() {
    local file=$1
    shift
    [ ! -e "$out/commands.txt" ] || sed -i "\|^$file: |d" "$out/commands.txt"
    printf '%s: %s\n' "$file" "$(words "$@" | sed 's/ $//')" >>"$out/commands.txt"
}

# keep FILE PROGRAM ARGUMENTS...: writes the output of the program to OUT_DIR/FILE, unless it exists.
keep() {
    local file=$1 program=$2 path=$2
    shift 2
    [ ! -e "$out/$file" ] || return 0
    case $program in
        */*) [ -x "$program" ] || { echo "skipped: $file: $program is missing" >&2; return 0; } ;;
        *) path=$examples/$program ;;
    esac
    step "$file"
    if ! "$path" "$@" >"$out/$file.partial" 2>"$file.log"; then
        tail -n 5 "$file.log" >&2
        rm "$out/$file.partial"
        failed+=("$file")
        return 0
    fi
    mv "$out/$file.partial" "$out/$file"
    note "$file" "$program" "$@"
}

# table FILE PROGRAM ARGUMENTS...: like keep, but only table lines, from stdout or stderr.
table() {
    local file=$1 program=$2
    shift 2
    [ ! -e "$out/$file" ] || return 0
    [ -x "$program" ] || { echo "skipped: $file: $program is missing" >&2; return 0; }
    step "$file"
    if ! "$program" "$@" 2>&1 | grep '^|' >"$out/$file.partial"; then
        rm "$out/$file.partial"
        failed+=("$file")
        return 0
    fi
    mv "$out/$file.partial" "$out/$file"
    note "$file" "$program" "$@"
}

# matrix NAME ARGUMENTS...: bench_matrix, which resumes from its own journal; keeps table and journal.
matrix() {
    local file=$1
    shift
    [ ! -e "$out/$file.csv" ] || return 0
    step "$file.csv"
    if ! "$examples/bench_matrix" "${ours[@]}" "$@" --out "bench-$file"; then
        failed+=("$file.csv")
        return 0
    fi
    cp "bench-$file/runs.ndjson" "$out/$file.ndjson"
    cp "bench-$file/results.csv" "$out/$file.csv"
    note "$file.csv" bench_matrix "${ours[@]}" "$@"
}

e2b=(--model e2b-target.gguf --assistant e2b-assistant.gguf)
e2b_pair() {
    [ ! -e e2b-target.gguf ] || [ ! -e e2b-assistant.gguf ] || return 0
    step "the E2B pair"
    # With key norm weights of 1, attention in the other engines would hit subnormal exponentials, which are slow.
    "$examples/synthesize" . e2b --key-norm 0.125 "${pair[@]}"
    note e2b-target.gguf synthesize . e2b --key-norm 0.125 "${pair[@]}"
}

# The version, and the cmake options if the build directory still exists.
build() {
    local bin=$1 cache=
    "$bin/llama-server" --version 2>&1 | grep -i version | head -n 1 | tr '\n' ' '
    for cache in "$bin/CMakeCache.txt" "$bin/../CMakeCache.txt" ''; do [ ! -e "$cache" ] || break; done
    [ -z "$cache" ] || sed -nE 's/^(CMAKE_BUILD_TYPE|CMAKE_C_FLAGS|CMAKE_CXX_FLAGS|GGML_NATIVE|GGML_AVX[A-Z0-9_]*|GGML_AMX[A-Z0-9_]*|GGML_OPENMP|GGML_LLAMAFILE|GGML_CPU_REPACK|GGML_IQK[A-Z_]*):[A-Z]*=(..*)$/-D\1=\2/p' "$cache" | tr '\n' ' '
}

stage_machine() {
    [ ! -e "$out/machine.txt" ] || return 0
    keep demo-verify-curve.json verify_curve "${ours[@]}" --repeats 3 --json
    local isa read model
    field() { sed -nE "s/.*\"$1\":\"?([^,\"}]*).*/\1/p" "$out/demo-verify-curve.json"; }
    isa=$(field isa) read=$(field read_gb_per_second)
    cpu() { sed -nE "/^$1[[:space:]]*:/{s/^[^:]*: *//p;q}" /proc/cpuinfo; }
    model=$(cpu 'model name')
    {
        echo "name: ${name:-$model, $isa}"
        echo "processor: $model (family $(cpu 'cpu family'), model $(cpu model)), $(nproc) CPUs"
        echo "memory: $(sed -nE 's/^MemTotal: *//p' /proc/meminfo)"
        echo "instruction set: $isa"
        echo "threads: 1"
        echo "reads: $(printf '%.1f' "$read") GB/s with one thread at best (demo-verify-curve.json)"
        echo "load when it began: $(cut -d' ' -f1-3 /proc/loadavg)"
        echo "date: $(date -u +%Y-%m-%d)"
        echo "commit: $(git -C "$root" rev-parse --short=10 HEAD)"
        echo "compiler: $(rustc --version)"
        [ -z "$llama" ] || echo "llama.cpp: $(build llama.cpp)"
        [ -z "$ik" ] || echo "ik_llama.cpp: $(build ik_llama.cpp)"
    } >"$out/machine.txt"
}

stage_demo() {
    local texts=3
    [ -z "$tiny" ] || texts=1
    matrix demo-matrix --prompts short,long --texts "$texts" --runs "$runs" --max-tokens 128
}

# Servers for plain decoding and for 1, 3 and 5 drafts per round (2, 4 and 6 rows).
stage_e2b() {
    e2b_pair
    local servers=() drafts
    if [ -x llama.cpp/llama-server ]; then
        servers=(--llama-server llama.cpp/llama-server --llama-args '')
        for drafts in 1 3 5; do
            servers+=(--llama-args "-md e2b-assistant.gguf --spec-type draft-mtp --spec-draft-n-max $drafts --spec-draft-p-min 0")
        done
    else
        echo 'skipped: llama.cpp in e2b-matrix.csv: no llama-server; use --llama' >&2
    fi
    matrix e2b-matrix "${e2b[@]}" --kv f16 --mixture mtp --prompts short --max-tokens "$tokens" --runs "$runs" "${servers[@]}"
}

stage_ik() {
    e2b_pair
    [ -x ik_llama.cpp/llama-server ] || { echo 'skipped: e2b-ik-matrix.csv: no llama-server; use --ik' >&2; return 0; }
    local servers=(--llama-server ik_llama.cpp/llama-server --llama-args '-rtr') drafts
    for drafts in 1 3 5; do
        servers+=(--llama-args "-rtr -md e2b-assistant.gguf --spec-type mtp:n_max=$drafts,p_min=0.0")
    done
    matrix e2b-ik-matrix "${e2b[@]}" --kv f16 --blocks 4,6 --mixture mtp --prompts short --max-tokens "$tokens" --runs "$runs" "${servers[@]}"
}

# Without prompt-lookup drafters: simulated acceptance is the same for any drafter. Rates by position are those published for 31B.
stage_acceptance() {
    e2b_pair
    local named
    for named in 31b=.92,.78,.67,.57 0.9=.9 0.8=.8 0.7=.7; do
        matrix "e2b-acceptance-${named%=*}" "${e2b[@]}" --kv f16 --mixture mtp --prompts short --max-tokens "$long" --runs "$runs" \
            --simulate-acceptance "${named#*=}"
    done
}

stage_passes() {
    e2b_pair
    # One row of each of several sequences, with logits as in a verification; llama-bench computes only those of the last row.
    local turn rows=(-t 1 -c 2048 -b 512 -npp 4 -ntg 16 -npl 1,2,4,6,8,16) read=(-t 1 -p "$prompt" -n 0 -r 2 -o json)
    for turn in 1 2; do
        keep "e2b-verify-curve-$turn.json" verify_curve "${e2b[@]}" "${ours[@]}" --repeats "$repeats" --json
        table "e2b-ik-batched-$turn.txt" ik_llama.cpp/llama-batched-bench -m e2b-target.gguf -rtr "${rows[@]}"
        keep "e2b-ik-bench-$turn.json" ik_llama.cpp/llama-bench -m e2b-target.gguf -rtr 1 "${read[@]}"
        table "e2b-llama-batched-$turn.txt" llama.cpp/llama-batched-bench -m e2b-target.gguf "${rows[@]}"
        keep "e2b-llama-bench-$turn.json" llama.cpp/llama-bench -m e2b-target.gguf "${read[@]}"
    done
}

stage_depth() {
    e2b_pair
    keep e2b-depth.json depth --model e2b-target.gguf "${ours[@]}" --depths "$depths" --kv f16,balanced --repeats 3 --json
}

stage_depth-peers() {
    e2b_pair
    keep e2b-ik-depth.json ik_llama.cpp/llama-bench -m e2b-target.gguf -t 1 -rtr 1 -p 0 -n 0 -gp "$peer_depth,12" -fa 1 \
        -ctk q8_0 -ctv q8_0 -r 1 -o json
    keep e2b-llama-depth.json llama.cpp/llama-bench -m e2b-target.gguf -t 1 -p 0 -n 12 -d "$peer_depth" -fa 1 -r 1 -o json
}

stage_codes() {
    keep kv-quality-synthetic.txt kv_quality --synthetic
}

for stage in "${stages[@]}"; do
    "stage_$stage"
done
step "done: $out"
[ ${#failed[@]} -eq 0 ] || { echo "failed, run again: ${failed[*]}" >&2; exit 1; }
