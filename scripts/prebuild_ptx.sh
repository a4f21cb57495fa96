#!/usr/bin/env bash
# Compiles the CUDA kernels to the PTX that the feature `cuda-prebuilt` embeds: once per release, with nvcc 13.0.
set -euo pipefail
cd "$(dirname "$0")/../gpu"
nvcc=$(command -v "${NVCC:-nvcc}") || { echo "${NVCC:-nvcc} is missing; scripts/install_nvcc.sh installs it" >&2; exit 1; }
ptxas=$(dirname "$nvcc")/ptxas
version=7.8 # of CUDA 11.8, older than every driver that `src/cuda/driver.rs` accepts
mkdir -p cuda/prebuilt
rm -f cuda/prebuilt/*.ptx
for source in shaders/*.cpp; do
    ptx="cuda/prebuilt/$(basename "${source%.cpp}").ptx"
    "$nvcc" -x cu -include cuda/device.cuh -std=c++17 -O3 -arch=compute_80 -ptx "$source" -o "$ptx"
    # nvcc writes its own PTX version, which older drivers reject, and a pragma of PTX 8.3. ptxas checks that nothing newer is
    # used.
    sed -i -e "s/^\.version .*/.version $version/" -e "/\.pragma \"used_bytes_mask/d" "$ptx"
    "$ptxas" -arch=sm_80 -o /dev/null "$ptx"
done
# The build script reports the expected digest.
: > cuda/prebuilt/SOURCES
said=$(cargo check --quiet --features cuda-prebuilt 2>&1) || true
digest=$(sed -n 's/.*these are \([0-9a-f]*\)).*/\1/p' <<<"$said" | head -n 1)
[ -n "$digest" ] || { echo "$said" >&2; exit 1; }
echo "$digest" > cuda/prebuilt/SOURCES
echo "cuda/prebuilt: $digest"
