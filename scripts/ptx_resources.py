#!/usr/bin/env python3
"""Registers, shared memory and spills of every kernel of gpu/cuda/prebuilt, as ptxas compiles it for a GPU's architecture.

NVCC=FOLDER/nvcc scripts/ptx_resources.py [sm_80 sm_89 sm_90]

A compiler's figures: nothing runs on a device. Fails if a kernel of products or attention spills.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

HOT = ("matmul", "attend")
ptxas = pathlib.Path(shutil.which(os.environ.get("NVCC", "nvcc")) or sys.exit("no nvcc: set NVCC")).parent / "ptxas"
folder = pathlib.Path(__file__).resolve().parent.parent / "gpu/cuda/prebuilt"
spilled = []
print(f"{'architecture':<13}{'kernel':<27}{'registers':>10}{'shared':>8}{'stack':>7}{'spilled':>9}")
for arch in sys.argv[1:] or ["sm_80", "sm_89", "sm_90"]:
    for ptx in sorted(folder.glob("*.ptx")):
        command = [ptxas, "-v", f"-arch={arch}", "-o", os.devnull, ptx]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        for name, text in sorted(re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", said, re.S)):
            def number(pattern):
                found = re.search(pattern, text)
                return int(found[1]) if found else 0

            registers, shared = number(r"Used (\d+) registers"), number(r"(\d+) bytes smem")
            stack, spills = number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes spill stores")
            print(f"{arch:<13}{name:<27}{registers:>10}{shared:>8}{stack:>7}{spills:>9}")
            if spills and name.startswith(HOT):
                spilled.append(f"{name} on {arch}: {spills} bytes")
if spilled:
    sys.exit("kernels spill: " + ", ".join(spilled))
