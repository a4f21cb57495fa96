#!/usr/bin/env python3
"""Registers, shared memory and spills of every kernel of gpu/cuda/prebuilt, as ptxas compiles it for a GPU's architecture.

NVCC=FOLDER/nvcc scripts/ptx_resources.py [sm_80 sm_89 sm_90]

Compiler figures: nothing runs on a device. Fails if a product or attention kernel spills, or if a kernel is missing.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

HOT = ("matmul", "attend")
FOLDER = pathlib.Path(__file__).resolve().parent.parent / "gpu/cuda/prebuilt"


def ptxas():
    """The path of ptxas next to nvcc, or none."""
    nvcc = shutil.which(os.environ.get("NVCC") or "nvcc")
    return nvcc and pathlib.Path(nvcc).parent / "ptxas"


def resources(compiler, architectures):
    """(architecture, kernel, registers, shared bytes, stack bytes, spilled bytes) of every kernel."""

    def compile(job):
        arch, ptx = job
        command = [compiler, "-v", f"-arch={arch}", "-o", os.devnull, ptx]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        rows = []
        for name, text in sorted(re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", said, re.S)):
            def number(pattern):
                found = re.search(pattern, text)
                return int(found[1]) if found else 0

            registers, shared = number(r"Used (\d+) registers"), number(r"(\d+) bytes smem")
            stack, spills = number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes spill stores")
            rows.append((arch, name, registers, shared, stack, spills))
        declared = set(re.findall(r"\.entry (\w+)\(", ptx.read_text()))
        if {row[1] for row in rows if row[2]} != declared:
            sys.exit(f"ptxas does not report some kernels of {ptx.name}")
        return rows

    jobs = [(arch, ptx) for arch in architectures for ptx in sorted(FOLDER.glob("*.ptx"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [row for rows in pool.map(compile, jobs) for row in rows]


def main():
    compiler = ptxas() or sys.exit("no nvcc: set NVCC")
    print(f"{'architecture':<13}{'kernel':<27}{'registers':>10}{'shared':>8}{'stack':>7}{'spilled':>9}")
    spilled = []
    for arch, name, registers, shared, stack, spills in resources(compiler, sys.argv[1:] or ["sm_80", "sm_89", "sm_90"]):
        print(f"{arch:<13}{name:<27}{registers:>10}{shared:>8}{stack:>7}{spills:>9}")
        if spills and name.startswith(HOT):
            spilled.append(f"{name} on {arch}: {spills} bytes")
    if spilled:
        sys.exit("kernels spill: " + ", ".join(spilled))


if __name__ == "__main__":
    main()
