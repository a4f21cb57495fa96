#!/usr/bin/env python3
"""Throughput and latency of a server under load:

    scripts/server_load.py [--seconds 8] [--loads 1,4,8,16] -- target/release/foretoken-server [OPTIONS]
    scripts/server_load.py --llama -- path/to/llama-server -m demo.gguf -np 16 -c 65536 [OPTIONS]

Starts the server on a free port. At each load, that many clients send greedy streamed completions of 128 tokens back to back, with
the server's default speculation and without, interleaved. Prints total tokens per second, and per second of the server's CPU time,
which other processes affect less; the time to the first token and the time between tokens (of a request: from its first to its
last, per token). Then four clients continue while another one sends prompts of --prompt-tokens: gaps between the events of the
four, with and without these prompts."""

import argparse
import asyncio
import json
import os
import pathlib
import signal
import socket
import statistics
import sys
import time

from server_soak import Server

PROMPTS = json.loads((pathlib.Path(__file__).parent.parent / "models/demo/prompts.json").read_text())
TOKENS = 128


def percentile(values, percent):
    """The least value that at least so many percent of all do not exceed."""
    return sorted(values)[-(-len(values) * percent // 100) - 1] if values else float("nan")


class Load:
    def __init__(self, server, llama, prompts):
        self.server, self.llama, self.prompts, self.sent, self.read = server, llama, prompts, 0, 0

    def processor_seconds(self):
        """CPU time used by the server."""
        ticks = pathlib.Path(f"/proc/{self.server.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    async def request(self, prompt, tokens, drafts):
        """Times of a text's events since its request, and its tokens."""
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"cache_prompt": False} if self.llama else {} if drafts else {"speculative": {"enabled": False}}
        # Its lines may be longer than asyncio's default limit.
        reader, writer = await self.server.open("/completion", json.dumps(body).encode(), limit=1 << 22)
        start = time.perf_counter()
        times, last = [], None
        async for line in reader:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - start)
                last = json.loads(line[6:])
        writer.close()
        if not last or "timings" not in last:
            raise SystemExit(f"no answer: {last}")
        return times, last["timings"]["predicted_n"]

    async def client(self, goes_on, drafts, done):
        while goes_on():
            self.sent += 1
            begin = time.perf_counter()
            done.append((begin, *await self.request(self.prompts[self.sent % len(self.prompts)], TOKENS, drafts)))

    async def measure(self, load, drafts, seconds):
        begin, used, done = time.perf_counter(), self.processor_seconds(), []
        goes_on = lambda: time.perf_counter() < begin + seconds
        await asyncio.gather(*(self.client(goes_on, drafts, done) for _ in range(load)))
        took, used = time.perf_counter() - begin, self.processor_seconds() - used
        tokens = sum(tokens for *_, tokens in done)
        first = [1e3 * times[0] for _, times, _ in done]
        between = [1e3 * (times[-1] - times[0]) / max(tokens - 1, 1) for _, times, tokens in done]
        return tokens / took, tokens / used, first, between

    async def disturbed(self, seconds, drafts, prompt_tokens):
        """Gaps between events of four clients: while no prompt is read, and while others' are; and the times of those."""
        text = "".join(f"let x{i} = {i};\n" for i in range(prompt_tokens))
        _, answer = await self.server.ask("/tokenize", json.dumps({"content": text}).encode())
        ids = json.loads(answer)["tokens"][:prompt_tokens]
        begin, done, read, over = time.perf_counter(), [], [], asyncio.Event()
        clients = [asyncio.create_task(self.client(lambda: not over.is_set(), drafts, done)) for _ in range(4)]
        await asyncio.sleep(seconds)
        while time.perf_counter() < begin + 2 * seconds:
            self.read = (self.read + 97) % len(ids)
            turned = ids[self.read:] + ids[:self.read]  # a new beginning: cached prefixes do not help
            start = time.perf_counter()
            await self.request(turned, 1, drafts)
            read.append((start, time.perf_counter()))
        over.set()
        await asyncio.gather(*clients)
        own = [(start, start + times[0]) for start, times, _ in done if times]  # the clients' own prompts
        gaps = ([], [])
        for start, times, _ in done:
            for a, b in zip(times, times[1:]):
                during = lambda prompts: any(start + a < end and start + b > of for of, end in prompts)
                if during(read):
                    gaps[1].append(1e3 * (b - a))
                elif not during(own):
                    gaps[0].append(1e3 * (b - a))
        return *gaps, [1e3 * (end - start) for start, end in read]


async def main(arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = open(os.devnull, "w")
    process = await asyncio.create_subprocess_exec(*arguments.command, "--port", str(port), stdout=log, stderr=log)
    load = Load(Server(process, port), arguments.llama, [prompt[:arguments.characters] for prompt in PROMPTS])
    try:
        for _ in range(600):
            try:
                await load.request(load.prompts[0], 8, True)
                break
            except (OSError, SystemExit):
                await asyncio.sleep(0.1)
        # Fills the prefix cache before anything is measured.
        for prompt in load.prompts:
            await load.request(prompt, 1, False)
        ways = [True] if arguments.llama else [True, False]
        print("requests  drafts  tokens/s  per processor s  first token ms p50  p99  between tokens ms p50  p99")
        for count in map(int, filter(None, arguments.loads.split(","))):
            rounds = {drafts: [] for drafts in ways}
            for _ in range(arguments.repeat):
                for drafts in ways:
                    rounds[drafts].append(await load.measure(count, drafts, arguments.seconds))
            for drafts, measured in rounds.items():
                rate, of_processor = (statistics.median(of[i] for of in measured) for i in (0, 1))
                first, between = ([value for of in measured for value in of[i]] for i in (2, 3))
                cells = [percentile(values, percent) for values in (first, between) for percent in (50, 99)]
                name = "-" if arguments.llama else "auto" if drafts else "off"
                print(f"{count:8}  {name:6}  {rate:8.0f}  {of_processor:15.0f}  " + "  ".join(f"{cell:8.2f}" for cell in cells), flush=True)
        if arguments.prompt_tokens:
            for drafts in ways:
                alone, meanwhile, read = await load.disturbed(arguments.seconds, drafts, arguments.prompt_tokens)
                p50, p99 = ([percentile(gaps, percent) for gaps in (alone, meanwhile)] for percent in (50, 99))
                name = "-" if arguments.llama else "auto" if drafts else "off"
                print(f"gaps of 4 streams, drafts {name}, ms: p50 {p50[0]:.2f}, p99 {p99[0]:.2f} undisturbed; "
                      f"p50 {p50[1]:.2f}, p99 {p99[1]:.2f} ({p99[1] / p99[0]:.2f}x) while {len(read)} prompts of "
                      f"{arguments.prompt_tokens} tokens were read, {statistics.median(read):.0f} ms each", flush=True)
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seconds", type=float, default=8)
parser.add_argument("--repeat", type=int, default=1, help="repetitions of all drafting modes at each load")
parser.add_argument("--loads", default="1,4,8,16")
parser.add_argument("--prompt-tokens", type=int, default=4096, help="length of the prompts sent meanwhile; 0 for none")
parser.add_argument("--characters", type=int, help="truncate the clients' prompts to this many characters")
parser.add_argument("--llama", action="store_true", help="the server is llama.cpp's")
parser.add_argument("command", nargs="+")
if __name__ == "__main__":
    sys.exit(asyncio.run(main(parser.parse_args())))
