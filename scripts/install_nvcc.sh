#!/usr/bin/env bash
# Installs the CUDA compiler from PyPI wheels into a folder and prints the path of nvcc: without root or the CUDA toolkit, 270 MB.
#
#   NVCC=$(scripts/install_nvcc.sh target/nvcc) cargo build --release --features cuda
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
command -v python3 >/dev/null || { echo "python3 with pip is required" >&2; exit 1; }
nvcc="$1/nvidia/cu13/bin/nvcc"
if [ ! -x "$nvcc" ]; then
    packages=()
    for name in nvcc crt runtime cccl; do packages+=("nvidia-cuda-$name==13.0.*"); done
    packages+=("nvidia-nvvm==13.0.*")
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$1" "${packages[@]}" >&2
fi
"$nvcc" --version >&2
realpath "$nvcc"
