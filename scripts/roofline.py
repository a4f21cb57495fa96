#!/usr/bin/env python3
"""A roofline model of every kernel of Gemma 4 on GPUs: time of a decode step and a round, and the kernels to optimise first.

    NVCC=FOLDER/nvcc scripts/roofline.py [--device NAME] [--model NAME] [--tables LINE] [--json] [--resources FILE]

A model: nothing is measured. scripts/device_launches.py enumerates the launches. The time of a launch is its launch cost plus the
longest of

    bytes       read and written once, divided by the bandwidth
    operations  instructions of its loops, divided by the rate of the multiprocessors that have a block
    latency     dependent loads of a block, times the waves of blocks in the grid at the given occupancy

The lower bound ("floor") is the time for its bytes, or for its products on the matrix unit if that is longer. The loss of a kernel
is the difference. Registers and shared memory are from ptxas (FILE: the output of scripts/ptx_resources.py); without nvcc, full
occupancy is assumed.
"""
import argparse
import functools
import itertools
import json
import math
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from device_launches import PUBLISHED, Shape, Weights, accept, bytes_of, draft, published, up, verify
from ptx_resources import ptxas, resources


class Device(NamedTuple):
    name: str
    arch: str  # "": no ptxas figures
    memory: float  # bytes
    bandwidth: float  # bytes/s
    lanes: float  # instructions of one lane per second
    matrix: float  # products of f16 per second on the matrix unit
    int8: float  # products of bytes per second on tensor cores; 0: dot products on lanes
    processors: int  # multiprocessors, or cores
    limits: tuple  # of a multiprocessor: threads, blocks, registers, bytes of shared memory
    latency: float  # seconds of a load from memory
    near: float  # and from the L2 cache
    launch: float  # seconds from the end of a kernel of a graph to the next one's first load
    wait: float  # seconds from the end of a round to the first kernel of the next


# Latencies are assumed: one and a half times those of pointer chases on idle devices (H100 479 cycles, RTX 4090 542: "Benchmarking
# and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", 2024). Launches and waits are also assumed: "Getting
# Started with CUDA Graphs" (NVIDIA, 2019) has half a microsecond between kernels, besides their own start. `VARIED` varies them.
DEVICES = [
    # "NVIDIA H200 Tensor Core GPU" datasheet (SXM): 141 GB, 4.8 TB/s, of which copies reach 4.3; 67 TFLOPS of f32; 989 of f16 and
    # 1979 TOPS of int8 without sparsity. Limits: "CUDA C++ Programming Guide", compute capability 9.0.
    Device("H200", "sm_90", 141e9, 4.3e12, 67e12 / 2, 989e12 / 2, 1979e12 / 2, 132, (2048, 32, 65536, 228 << 10), 400e-9, 200e-9,
           1.2e-6, 10e-6),
    # "NVIDIA Ada GPU Architecture" whitepaper: 24 GB, 1.008 TB/s, of which the H200's share is assumed to be reached; 82.6 TFLOPS
    # of f32; 165.2 of f16 with f32 sums, and 660.6 TOPS of int8, without sparsity. Limits: compute capability 8.9.
    Device("RTX 4090", "sm_89", 24e9, 0.9 * 1.008e12, 82.6e12 / 2, 165.2e12 / 2, 660.6e12 / 2, 128, (1536, 24, 65536, 100 << 10),
           350e-9, 150e-9, 1.2e-6, 10e-6),
    # "MacBook Pro Tech Specs" (Apple): 40 cores, 546 GB/s, 128 GB. Assumed: the H200's share of the bandwidth; 128 lanes per core
    # at 1.6 GHz, which also run simdgroup matrices; 1024 threads of a core at a time.
    Device("M4 Max", "", 128e9, 0.9 * 546e9, 40 * 128 * 1.6e9, 40 * 128 * 1.6e9, 0, 40, (1024, 32, 0, 0),
           500e-9, 250e-9, 2.5e-6, 100e-6),
]  # fmt: skip

VARIED = {"half the latencies": (0.5, 1), "twice the latencies": (2, 1), "half the launch": (1, 0.5), "twice the launch": (1, 2)}
CASES = [(weights, kv, depth) for weights in ("q4_k_m", "bf16") for kv in ("f16", "balanced") for depth in (512, 32768)]


class Cost(NamedTuple):
    """Seconds of a launch, by what limits it."""

    launch: float
    bytes: float
    operations: float
    latency: float
    floor: float

    @property
    def now(self):
        return self.launch + max(self.bytes, self.operations, self.latency)

    @property
    def limit(self):
        return max(self._fields[:4], key=lambda name: getattr(self, name))


def occupancy(device, launch, figures):
    """Resident blocks of a launch per multiprocessor."""
    threads, blocks, registers, shared = device.limits
    fit = min(blocks, threads // launch.threads)
    if (device.arch, launch.kernel) in figures:
        used, bytes = figures[device.arch, launch.kernel]
        # A warp's registers are a multiple of 256; a block takes 1 KiB of shared memory for itself.
        fit = min(fit, registers // (up(32 * used, 256) * 256 * up(launch.threads, 32)), shared // (bytes + launch.shared + 1024))
    return max(fit, 1)


def cost(device, launch, figures):
    blocks, instructions = math.prod(launch.grid), launch.instructions
    tensor = launch.mma / device.int8 if device.int8 else 0
    if not device.int8:
        instructions += launch.dots * 54 / 16  # gpu/metal/device.metal: 54 for a column's 16 products of a lane
    by_bytes = launch.bytes / device.bandwidth
    operations = max(instructions / device.lanes, tensor) / min(1, blocks / device.processors)
    waves = up(blocks, device.processors * occupancy(device, launch, figures))
    latency = waves * (launch.trips * device.latency + launch.near * device.near)
    return Cost(device.launch, by_bytes, operations, latency, max(by_bytes, launch.products / device.matrix))


class Kernel:
    """The launches of one kernel in a step or a round."""

    def __init__(self):
        self.launches, self.bytes, self.instructions, self.blocks = 0, 0, 0, math.inf
        self.now, self.sums, self.limits = 0, Cost(0, 0, 0, 0, 0), Counter()

    def add(self, device, launch, count, figures):
        one = cost(device, launch, figures)
        self.launches += count
        self.bytes += count * launch.bytes
        self.instructions += count * launch.instructions
        self.blocks = min(self.blocks, occupancy(device, launch, figures))
        self.now += count * one.now
        self.sums = Cost(*(sum + count * x for sum, x in zip(self.sums, one)))
        self.limits[one.limit] += count * one.now


class Times:
    """A step or a round on a device, kernel by kernel."""

    def __init__(self, device, launches, figures):
        self.kernels = defaultdict(Kernel)
        for launch, count in launches.items():
            self.kernels[launch.kernel].add(device, launch, count, figures)
        self.now = device.wait + sum(kernel.now for kernel in self.kernels.values())
        self.floor = sum(kernel.sums.floor for kernel in self.kernels.values())

    def table(self):
        columns = ("blocks", "MB", "Gop", "launch", "bytes", "ops", "latency", "time", "floor")
        print(f"    {'kernel':<26}{'launches':>8}" + "".join(f"{column:>9}" for column in columns) + f"{'share':>7}  limit")
        for name, kernel in sorted(self.kernels.items(), key=lambda item: -item[1].now):
            *limits, floor = (1e6 * x for x in kernel.sums)
            micros = "".join(f"{x:>9.1f}" for x in (*limits, 1e6 * kernel.now, floor))
            print(f"    {name:<26}{kernel.launches:>8}{kernel.blocks:>9}{kernel.bytes / 1e6:>9.1f}{kernel.instructions / 1e9:>9.2f}"
                  f"{micros}{kernel.now / self.now:>7.1%}  {kernel.limits.most_common(1)[0][0]}")  # fmt: skip
        launches = sum(kernel.launches for kernel in self.kernels.values())
        print(f"    {'all, and the wait':<26}{launches:>8}{'':>63}{1e6 * self.now:>9.1f}{1e6 * self.floor:>9.1f}")


@functools.cache
def launches(name, weights, kv, depth):
    """The launches and their counts for a step, a draft step, a round of four, and passes with more rows."""
    text, assistant = published(name)
    shape, state = Shape(text), (Weights(weights, "bf16"), kv, depth)
    passes = {rows: verify(shape, *state, rows) + accept(shape, rows) for rows in (1, 2, 4, 8)}
    table = state[0].of("embedding", shape.hidden)
    drafts = [draft(shape, assistant, table, link == 0, *state) for link in range(3)]
    lists = {"step": passes[1], "draft": drafts[1], "round": sum(drafts, []) + passes[4], **passes}
    return {what: Counter(list) for what, list in lists.items()}


def family(kernel):
    """The template that a kernel is an instance of."""
    kernel = re.sub(r"^(matmul|matmul_buckets)_(f32|f16|bf16)(_\d+)?(_wide)?$", r"\1_float", kernel)
    return re.sub(r"^(attend)_(f32|f16|bf16)", r"\1_exact", re.sub(r"(_i?q\d_\w+|_\d+)+$", "", kernel))


def losses(device, names, figures):
    """Seconds above the floors of a step and a round, and launch costs, by template, summed over models and cases that fit."""
    lost, starts = Counter(), Counter()
    for name in names:
        for case in CASES:
            for what in ("step", "round") if fits(device, name, case) else ():
                for kernel, times in Times(device, launches(name, *case)[what], figures).kernels.items():
                    lost[family(kernel)] += times.now - times.sums.floor
                    starts[family(kernel)] += times.sums.launch
    return lost, starts


def fits(device, name, case):
    return bytes_of(name, case[0]) < 0.95 * device.memory


def first_three(losses):
    """The templates with the largest losses, all devices weighted equally, with their share."""
    parts = Counter()
    for lost, _ in losses:
        for kernel, seconds in lost.items():
            parts[kernel] += seconds / lost.total() / len(losses)
    return ", ".join(f"{kernel} ({part:.0%})" for kernel, part in parts.most_common(3))


def report(device, name, tables, figures):
    """Prints a line per case, and the kernels of one of them."""
    print(f"\n  {name} on {device.name}: milliseconds; relative to a step: passes with more rows, the round of four; the same for the floors")
    columns = ("floor", "step", "draft", "round", "2 rows", "4 rows", "8 rows", "round", "floors")
    print(f"    {'weights':<9}{'K/V':<10}{'depth':>6}{'GB':>7}" + "".join(f"{column:>9}" for column in columns))
    for case in CASES:
        print(f"    {case[0]:<9}{case[1]:<10}{case[2]:>6}{bytes_of(name, case[0]) / 1e9:>7.1f}", end="")
        if not fits(device, name, case):
            print("  exceeds the device's memory")
            continue
        times = {what: Times(device, list, figures) for what, list in launches(name, *case).items()}
        step = times["step"]
        seconds = step.floor, step.now, times["draft"].now, times["round"].now
        steps = [times[what].now / step.now for what in (2, 4, 8, "round")] + [times["round"].floor / step.floor]
        print("".join(f"{1e3 * x:>9.3f}" for x in seconds) + "".join(f"{x:>9.2f}" for x in steps))
    case = CASES[tables]
    for what in ("step", "round") if fits(device, name, case) else ():
        print(f"\n    {name} on {device.name}, {case[0]}, {case[1]} K/V, depth {case[2]}: a {what}, microseconds")
        Times(device, launches(name, *case)[what], figures).table()


def as_json(devices, names, figures):
    cases = []
    for device, name, case in itertools.product(devices, names, CASES):
        if not fits(device, name, case):
            continue
        parts = {}
        for what, list in launches(name, *case).items():
            times = Times(device, list, figures)
            of = lambda kernel: {"launches": kernel.launches, "seconds": kernel.now} | kernel.sums._asdict()
            kernels = {kernel: of(times.kernels[kernel]) for kernel in times.kernels}
            name_of_part = f"{what} rows" if isinstance(what, int) else what
            parts[name_of_part] = {"seconds": times.now, "floor": times.floor, "kernels": kernels}
        cases.append({"device": device.name, "model": name, "weights": case[0], "kv": case[1], "depth": case[2]} | parts)
    lost = [losses(device, names, figures) for device in devices]
    by_device = {device.name: of[0] for device, of in zip(devices, lost)}
    return {"occupancy": bool(figures), "cases": cases, "lost_seconds": by_device, "mend_first": first_three(lost)}


def figures_of(file):
    """(registers, bytes of shared memory) by architecture and kernel, or the reason why they are missing."""
    if file:
        rows = [line.split() for line in Path(file).read_text().splitlines() if line.startswith("sm_")]
        if missing := {device.arch for device in DEVICES if device.arch} - {row[0] for row in rows}:
            sys.exit(f"{file}: has no {', '.join(sorted(missing))}")
        return {(arch, kernel): (int(registers), int(shared)) for arch, kernel, registers, shared, *_ in rows}, None
    if not ptxas():
        return {}, "no nvcc: set NVCC"
    rows = resources(ptxas(), [device.arch for device in DEVICES if device.arch])
    return {(arch, kernel): (registers, shared) for arch, kernel, registers, shared, *_ in rows}, None


def main():
    parser = argparse.ArgumentParser(description="A roofline model of the kernels on GPUs; nothing is measured.")
    parser.add_argument("--device", choices=[device.name for device in DEVICES], action="append", help="only this device")
    parser.add_argument("--model", choices=list(PUBLISHED), action="append", help="only this variant")
    parser.add_argument("--tables", type=int, default=0, choices=range(len(CASES)), help="the case whose kernels are listed (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--resources", metavar="FILE", help="output of ptx_resources.py, instead of running ptxas")
    args = parser.parse_args()
    figures, missing = figures_of(args.resources)
    devices = [device for device in DEVICES if device.name in (args.device or [device.name])]
    names = args.model or list(PUBLISHED)
    if args.json:
        return print(json.dumps(as_json(devices, names, figures)))
    print("A model: nothing was measured on a device.")
    if missing:
        print(f"skipped: occupancy: {missing}; full occupancy is assumed")
    lost = []
    for device in devices:
        print(f"\n{device.name}: {device.bandwidth / 1e12:.2f} TB/s, {device.processors} multiprocessors")
        for name in names:
            report(device, name, args.tables, figures)
        lost.append(losses(device, names, figures))
        all, starts = lost[-1]
        print(f"\n  {device.name}: milliseconds above the floors over steps and rounds of all cases; launch costs; share of the total")
        for kernel, seconds in all.most_common(8):
            print(f"    {kernel:<26}{1e3 * seconds:>9.1f}{1e3 * starts[kernel]:>9.1f}{seconds / all.total():>7.1%}")
        print(f"    {'all':<26}{1e3 * all.total():>9.1f}{1e3 * starts.total():>9.1f}")
    print(f"\nLargest losses by share of the total, all devices weighted equally: {first_three(lost)}")
    for what, (latency, launch) in VARIED.items():
        varied = [d._replace(latency=latency * d.latency, near=latency * d.near, launch=launch * d.launch) for d in devices]
        print(f"  with {what}: {first_three([losses(device, names, figures) for device in varied])}")


if __name__ == "__main__":
    main()
