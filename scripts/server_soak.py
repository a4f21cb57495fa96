"""Soak of foretoken-server: `python3 scripts/server_soak.py [--seconds 1200] [--server target/release/foretoken-server]`.

32 connections send random requests for 20 minutes: whole and streamed texts, several choices, clients that disconnect, read
slowly or not at all, JSON under a schema, pathological schemas, invalid bodies and headers. Fails if a completed greedy text differs
from the one that the server generates for that request alone, a response has an unexpected status, the resident memory of the last
quarter is more than 2 % above that of the first, a sequence or its KV cache is not released, or SIGTERM does not end the process with 0. Before that,
a warm-up of --warm-up seconds drives memory to its peak, with the same action on all connections at once: the allocator keeps the
peak."""

import argparse
import asyncio
import collections
import json
import pathlib
import random
import re
import signal
import statistics
import sys
import time

CONNECTIONS = 32
KV_MEMORY = 128 << 20  # bytes; the prefix cache takes up to half of it, which the warm-up fills
PROMPTS = ["impl Iterator for Counter {\n", "fn main() {\n", "/// Returns the", "match self {\n", "#[derive(Debug)]\nstruct "]
LENGTHS = [1, 5, 24, 60]
BAD = [
    b"", b"{", b"[]", b"null", b'{"prompt": 3}', b'{"prompt": "x", "n": 1000}', b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "\xff"}', b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": ' + b"[" * 5000, b"x" * 100_000,
    b'{"prompt": "x", "logit_bias": {"9999999": 1}}', json.dumps({"prompt": "x y " * 20_000}).encode(),
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,9}$"}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def nested(depth):
    return {"type": "array", "items": nested(depth - 1) if depth else {"type": "string"}, "minItems": 999, "maxItems": 1000}


# Pathological schemas, but not within the first 8 tokens.
LATE_BOMBS = [nested(60), {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}]
# Schemas that no text satisfies, or pathological ones.
BOMBS = [
    {"type": "object", "properties": {f"p{i}": {} for i in range(9000)}},
    {"type": "string", "minLength": 10**9, "maxLength": 10**12},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#"},
    {"enum": []},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "string", "pattern": "(?=x)"},
]


class Server:
    def __init__(self, process, port):
        self.process, self.port = process, port

    @classmethod
    async def start(cls, path):
        options = ["--port", "0", "--parallel", "8", "--max-queue", "64", "--ctx-size", "1024", "--idle-timeout", "4",
                   "--kv-memory", str(KV_MEMORY)]
        process = await asyncio.create_subprocess_exec(path, *options, stderr=asyncio.subprocess.PIPE)
        while line := await process.stderr.readline():
            if found := re.search(rb"http://[0-9.]+:(\d+)", re.sub(rb"\x1b\[[0-9;]*m", b"", line)):
                server = cls(process, int(found[1]))
                server.log = asyncio.create_task(server.read_log())
                return server
        raise SystemExit("the server did not start")

    async def read_log(self):
        while await self.process.stderr.readline():
            pass

    def resident(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1])

    async def open(self, path, body, method="POST", limit=1 << 16):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def ask(self, path, body=b"", method="POST"):
        """The status and the body of a response."""
        reader, writer = await self.open(path, body, method)
        try:
            answer = await reader.read()
        finally:
            writer.close()
        head, _, rest = answer.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            rest = unchunked(rest)
        return int(head[9:12]), rest.decode()


def unchunked(data):
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        out += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return out


class Soak:
    def __init__(self, server, seed):
        self.server, self.random = server, random.Random(seed)
        self.wrong, self.counts, self.want = [], collections.Counter(), {}

    def body(self, prompt, length, **more):
        return json.dumps({"prompt": prompt, "max_tokens": length, "temperature": 0, **more}).encode()

    async def learn(self):
        """The texts, each generated alone."""
        for prompt in PROMPTS:
            for length in LENGTHS:
                status, text = await self.server.ask("/v1/completions", self.body(prompt, length))
                assert status == 200, text
                self.want[prompt, length] = json.loads(text)["choices"][0]["text"]
            status, text = await self.server.ask("/v1/completions", self.formed_body(prompt))
            assert status == 200, text
            self.want[prompt, "formed"] = json.loads(text)["choices"][0]["text"]
            assert json.loads(self.want[prompt, "formed"]).keys() == {"name", "size"}, text

    def check(self, what, holds, shown):
        self.counts[what] += 1
        if not holds:
            self.wrong.append(f"{what}: {shown!r:.300}")

    def speculation(self):
        return self.random.choice([{}, {"speculative": {"enabled": False}}, {"speculative": {"draft_block_size": 4}}])

    async def whole(self):
        prompt, length, n = self.random.choice(PROMPTS), self.random.choice(LENGTHS), self.random.choice([1, 1, 1, 3])
        status, text = await self.server.ask("/v1/completions", self.body(prompt, length, n=n, **self.speculation()))
        if status == 429:
            self.counts["429"] += 1
            return
        texts = [choice["text"] for choice in json.loads(text)["choices"]] if status == 200 else None
        self.check("whole", texts == [self.want[prompt, length]] * n, text)

    async def streamed(self):
        prompt, length = self.random.choice(PROMPTS), self.random.choice(LENGTHS)
        path = self.random.choice(["/v1/completions", "/v1/chat/completions"])
        body = {"max_tokens": length, "temperature": 0, "stream": True, **self.speculation()}
        body |= {"prompt": prompt} if path == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
        status, text = await self.server.ask(path, json.dumps(body).encode())
        if status == 429:
            self.counts["429"] += 1
            return
        events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        choices = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
        written = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
        self.check("streamed", status == 200 and events[-1:] == ["[DONE]"] and written == self.want[prompt, length], text)

    def formed_body(self, prompt, **more):
        return self.body(prompt, 100, response_format=self.format(SCHEMA), **more)

    def format(self, schema):
        return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}

    async def formed(self):
        prompt = self.random.choice(PROMPTS)
        status, text = await self.server.ask("/v1/completions", self.formed_body(prompt, **self.speculation()))
        if status == 429:
            self.counts["429"] += 1
            return
        written = json.loads(text)["choices"][0]["text"] if status == 200 else None
        self.check("under a schema", written == self.want[prompt, "formed"], text)

    async def bomb(self):
        bomb = self.random.choice(BOMBS + LATE_BOMBS)
        # Compiled schemas are cached, so each one is different.
        schema = bomb | {"title": str(self.random.random())}
        body = self.body(self.random.choice(PROMPTS), 8, response_format=self.format(schema))
        status, text = await self.server.ask("/v1/completions", body)
        self.check("schema bombs", status in (400, 429) or (bomb in LATE_BOMBS and status == 200), f"{schema!r:.60}: {status} {text}")

    async def leaves(self):
        n = self.random.choice([1, 2])
        body = self.body(self.random.choice(PROMPTS) * self.random.choice([1, 20]), 900, ignore_eos=True, stream=True, n=n)
        _, writer = await self.server.open("/v1/completions", body)
        await asyncio.sleep(self.random.random())
        writer.close()
        self.counts["left"] += 1

    async def slow(self):
        body = self.body(self.random.choice(PROMPTS), 200, stream=True, ignore_eos=True)
        reader, writer = await self.server.open("/v1/completions", body)
        for _ in range(self.random.choice([0, 3, 20])):
            await asyncio.sleep(0.3)
            if not await reader.read(400):
                break
        writer.close()
        self.counts["read slowly"] += 1

    async def bad(self):
        path = self.random.choice(["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/completion"])
        status, text = await self.server.ask(path, self.random.choice(BAD))
        self.check("refused", 400 <= status < 500, f"{path}: {status} {text}")

    async def broken(self):
        """A truncated header, a truncated body, or not HTTP."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        half = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90\r\ncontent-type: application/json\r\n\r\n{"
        writer.write(self.random.choice([b"", b"GET /hea", half, bytes(self.random.randbytes(200)) + b"\r\n\r\n"]))
        await asyncio.sleep(self.random.random())
        writer.close()
        self.counts["broken"] += 1

    async def large(self):
        status, text = await self.server.ask("/v1/completions", BAD[-1])
        self.check("refused", status in (400, 429), f"{status} {text}")

    async def warm_up(self, seconds):
        phases = [self.large, self.bomb, self.formed, self.leaves, self.slow, self.streamed, self.whole]
        for action in phases:
            end = time.monotonic() + seconds / len(phases)
            await asyncio.gather(*(self.client(end, [action]) for _ in range(CONNECTIONS)))

    def mixed(self):
        return [self.whole] * 5 + [self.streamed] * 5 + [self.leaves] * 3 + [self.slow, self.bad, self.bad, self.broken, self.formed, self.bomb]

    async def client(self, end, actions):
        while time.monotonic() < end:
            try:
                await asyncio.wait_for(self.random.choice(actions)(), 120)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.counts["reset"] += 1
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(1)

    async def memory(self, end, samples):
        while time.monotonic() < end:
            samples.append(self.server.resident())
            await asyncio.sleep(1)

    async def settled(self):
        """All sequences are free, and no KV cache memory is in use but the prefix cache's."""
        for _ in range(100):
            _, slots = await self.server.ask("/slots", method="GET")
            _, metrics = await self.server.ask("/metrics", method="GET")
            held = float(re.search(r"^foretoken:kv_cache_bytes\{.*\} (.*)$", metrics, re.M)[1])
            if not any(slot["is_processing"] for slot in json.loads(slots)) and held <= KV_MEMORY / 2:
                return True
            await asyncio.sleep(0.2)
        return False


async def main(arguments):
    server = await Server.start(arguments.server)
    soak, samples = Soak(server, arguments.seed), []
    await soak.learn()
    await soak.warm_up(arguments.warm_up)
    end = time.monotonic() + arguments.seconds
    clients = (soak.client(end, soak.mixed()) for _ in range(CONNECTIONS))
    await asyncio.gather(soak.memory(end, samples), *clients)
    if not await soak.settled():
        soak.wrong.append("sequences or KV cache memory are not released")
    quarter = max(len(samples) // 4, 1)
    before, after = (statistics.median(part) for part in [samples[:quarter], samples[-quarter:]])
    if after > 1.02 * before:
        soak.wrong.append(f"resident memory grew from {before} to {after} KiB")
    server.process.send_signal(signal.SIGTERM)
    code = await asyncio.wait_for(server.process.wait(), 60)
    if code != 0:
        soak.wrong.append(f"SIGTERM: the process ended with {code}")
    print(f"{arguments.seconds} s, {CONNECTIONS} connections: {dict(soak.counts)}")
    print(f"resident memory, MiB: {before / 1024:.1f} in the first quarter, {after / 1024:.1f} in the last")
    for problem in soak.wrong[:20]:
        print(f"wrong: {problem}")
    return len(soak.wrong)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seconds", type=float, default=1200)
parser.add_argument("--warm-up", type=float, default=120)
parser.add_argument("--server", default="target/release/foretoken-server")
parser.add_argument("--seed", type=int, default=1)
if __name__ == "__main__":
    sys.exit(1 if asyncio.run(main(parser.parse_args())) else 0)
