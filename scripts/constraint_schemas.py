#!/usr/bin/env python3
"""Generates JSON under 200 generated schemas with a server, with and without speculation:

    scripts/constraint_schemas.py [--server target/release/foretoken-server] [--count 200] [--seed 1] [--parallel 8]

needs PyPI's jsonschema (last line). The schemas have the keywords that schemas of APIs, tools and configurations have, nested and combined by
chance: published collections are of mixed licences. Every text is checked by jsonschema, and must be the same with and without
speculation. A schema that the server refuses is counted and named, and a text that does not end, as digits and strings without a
limit allow, is counted and only compared. Fails if any other is wrong.

    pip install jsonschema rfc3339-validator"""

import argparse
import collections
import concurrent.futures
import json
import random
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import jsonschema

PROMPT = "/// The value as JSON:\nlet value = r#\""
TOKENS = 400
WORDS = ["id", "name", "kind", "tags", "size", "owner", "created_at", "is_open", "größe", "x-y", "a b", "path/to", "items", "$n"]
FORMATS = ["date", "time", "date-time", "ipv4", "uuid", "email", "hostname"]
PATTERNS = ["^[a-z]{1,12}$", "^[A-Z]{2}[0-9]{1,4}$", "^v[0-9]+\\.[0-9]+$", "^(GET|POST|PUT)$", "^#[0-9a-f]{6}$", "^[^\\s@]{1,8}@[a-z]{1,8}$"]


class Schemas:
    """Schemas whose texts are short: strings, lists and depth are bounded."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def document(self):
        make = self.random.choice([self.object] * 6 + [self.array, self.referring, self.tagged])
        schema = make(self.random.randint(1, 3))
        if self.random.random() < 0.5:
            schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "It", "description": "A value."}
        return schema

    def value(self, depth):
        leaves = [self.string, self.string, self.integer, self.number, self.boolean, self.null, self.constant]
        inner = [self.object, self.object, self.array, self.tuple, self.either, self.all] if depth > 0 else []
        return self.random.choice(leaves + inner)(depth - 1)

    def string(self, _):
        kind = self.random.random()
        if kind < 0.25:
            return {"type": "string", "pattern": self.random.choice(PATTERNS)}
        if kind < 0.5:
            return {"type": "string", "format": self.random.choice(FORMATS)}
        least = self.random.randint(0, 5)
        return {"type": "string", "minLength": least, "maxLength": least + self.random.randint(0, 12)}

    def integer(self, _):
        least = self.random.randint(-1000, 1000)
        schema = {"type": "integer", "minimum": least, "maximum": least + self.random.randint(10, 10**6)}
        if self.random.random() < 0.2:
            schema["multipleOf"] = self.random.choice([2, 5, 10])
        return schema

    def number(self, _):
        least = round(self.random.uniform(-100, 100), 2)
        bound = self.random.choice(["maximum", "exclusiveMaximum"])
        return {"type": "number", "minimum": least, bound: least + self.random.choice([0.5, 10, 1000])}

    def boolean(self, _):
        return {"type": "boolean"}

    def null(self, _):
        return {"type": "null"}

    def constant(self, _):
        values = ["red", "größe", 'a "b"\n', 1, -2.5, True, None, [1, "x"], {"k": 1}, ""]
        if self.random.random() < 0.3:
            return {"const": self.random.choice(values)}
        return {"enum": self.random.sample(values, self.random.randint(1, 5))}

    def object(self, depth):
        names = self.random.sample(WORDS, self.random.randint(0, 5))
        required = [name for name in names if self.random.random() < 0.6]
        schema = {"type": "object", "properties": {name: self.value(depth) for name in names}, "required": required}
        schema["additionalProperties"] = False
        if self.random.random() < 0.15:
            return {"type": "object", "additionalProperties": self.integer(0), "maxProperties": 2}
        return schema

    def array(self, depth):
        least = self.random.randint(0, 2)
        return {"type": "array", "items": self.value(depth), "minItems": least, "maxItems": least + self.random.randint(0, 2)}

    def tuple(self, depth):
        items = [self.value(depth) for _ in range(self.random.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def either(self, depth):
        return {"anyOf": [self.value(depth) for _ in range(self.random.randint(2, 3))]}

    def all(self, _):
        least = self.random.randint(0, 50)
        return {"allOf": [{"type": "integer", "minimum": least}, {"maximum": least + 500}]}

    def referring(self, depth):
        definitions = {"part": self.object(depth - 1), "code": self.string(0)}
        properties = {"first": {"$ref": "#/$defs/part"}, "codes": {"type": "array", "items": {"$ref": "#/$defs/code"}, "maxItems": 2}}
        return {"$defs": definitions, "type": "object", "properties": properties, "required": ["first"], "additionalProperties": False}

    def tagged(self, depth):
        def case(name):
            properties = {"type": {"const": name}, "value": self.value(depth - 1)}
            return {"type": "object", "properties": properties, "required": ["type", "value"], "additionalProperties": False}

        return {self.random.choice(["anyOf", "oneOf"]): [case("circle"), case("square")]}


def ask(url, schema, **more):
    # Otherwise most of a text would be white space.
    schema = schema | {"x-guidance": {"whitespace_flexible": False}}
    response_format = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "response_format": response_format, **more}
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), head)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def check(url, schema):
    """The error, or None; the problem if the schema is rejected; the responses."""
    off = ask(url, schema, speculative={"enabled": False})
    if "error" in off:
        return None, off["error"]["message"], []
    on = ask(url, schema)
    texts = [answer["choices"][0]["text"] for answer in (off, on)]
    if texts[0] != texts[1]:
        return f"with drafts {texts[1]!r}, without {texts[0]!r}", None, []
    if off["choices"][0]["finish_reason"] != "stop":
        return None, None, [off, on]
    validator = jsonschema.Draft202012Validator
    try:
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(texts[0]))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{texts[0]!r}: {error!s:.300}", None, []
    return None, None, [off, on]


def main(arguments):
    schemas = Schemas(arguments.seed)
    schemas = [schemas.document() for _ in range(arguments.count)]
    command = [arguments.server, "--port", "0", "--parallel", str(arguments.parallel)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        lines = (re.sub(r"\x1b\[[0-9;]*m", "", line) for line in process.stderr)
        url = next(found[1] for line in lines if (found := re.search(r"(http://[0-9.]+:\d+)", line)))
        # Otherwise the log would fill its pipe.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        start = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(arguments.parallel) as threads:
            results = list(threads.map(lambda schema: check(url, schema), schemas))
            seconds = time.monotonic() - start
            process.terminate()
    finally:
        process.kill()
    wrong = [(schema, problem) for schema, (problem, _, _) in zip(schemas, results) if problem]
    refused = collections.Counter(problem for _, problem, _ in results if problem)
    pairs = [answers for _, _, answers in results if answers]
    cut = sum(off["choices"][0]["finish_reason"] != "stop" for off, _ in pairs)
    tokens, milliseconds = [
        [sum(pair[i]["timings"][name] for pair in pairs) for i in (0, 1)] for name in ("predicted_n", "predicted_ms")
    ]
    counts = f"{cut} are cut at {TOKENS} tokens, {sum(refused.values())} are refused, {len(wrong)} are wrong"
    print(f"{len(pairs) - cut} of {len(schemas)} schemas passed, {counts}; {seconds:.0f} s")
    print(f"{tokens[0]} tokens, decoding with speculation {milliseconds[0] / max(milliseconds[1], 1e-9):.2f}x as fast as without")
    for problem, count in refused.items():
        print(f"rejected ({count}): {problem}")
    for schema, problem in wrong[:20]:
        print(f"wrong: {json.dumps(schema)}: {problem}")
    return len(wrong)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--server", default="target/release/foretoken-server")
parser.add_argument("--count", type=int, default=200)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--parallel", type=int, default=8)
if __name__ == "__main__":
    sys.exit(1 if main(parser.parse_args()) else 0)
