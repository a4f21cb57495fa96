#!/usr/bin/env bash
# Checks and times the CUDA kernels on a device.
#
#   scripts/bench_cuda.sh               builds, then runs
#   scripts/bench_cuda.sh build FOLDER  leaves two executables in FOLDER, for a machine without Rust
#   scripts/bench_cuda.sh run FOLDER    runs them: the suite, the suite under compute-sanitizer where there is one, the timings
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-all} folder=${2:-target/cuda-bench}

executable() { # of cargo's messages, the last one's
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}

if [ "$what" != run ]; then
    NVCC=${NVCC:-$(command -v nvcc || scripts/install_nvcc.sh target/nvcc)}
    export NVCC
    build=(--release -p foretoken-kernels --features cuda --message-format json)
    mkdir -p "$folder"
    cp "$(cargo test "${build[@]}" --no-run --test cuda | executable)" "$folder/suite"
    cp "$(cargo build "${build[@]}" --example cuda_speed | executable)" "$folder/speed"
fi
if [ "$what" != build ]; then
    "$folder/suite" --nocapture
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do compute-sanitizer --tool "$tool" "$folder/suite" kernels_agree; done
    fi
    "$folder/speed"
fi
