"""The measured figures of README.md and DESIGN.md, from the raw files in benches/record; see readme_figures.sh."""

import csv
import json
import re
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "DESIGN.md"]
BLOCK = re.compile(r"<!-- figures:begin (\S+) (\S+) -->(.*?)<!-- figures:end -->", re.DOTALL)
# Speeds may only be quoted from a record.
SPEED = re.compile(r"\d(?: tokens/s| [mu]s\b| (?:G|GB|TB)/s|(?:\.\d+)?x\b)")


class Record:
    """A directory of raw files, and which of them a block has used."""

    def __init__(self, name):
        self.path = ROOT / "benches/record" / name
        if not self.path.is_dir():
            sys.exit(f"{self.path}: is not a directory of the record")
        self.used = []

    def files(self, pattern):
        found = sorted(self.path.glob(pattern))
        self.used += [path for path in found if path not in self.used]
        return found

    def title(self):
        lines = (self.path / "machine.txt").read_text().splitlines()
        fields = dict(line.split(": ", 1) for line in lines if ": " in line)
        return fields["name"]

    def matrix(self, pair, prompt="128", kv="f16"):
        """Speeds by mode in the pair's last bench_matrix file; empty if there is no file."""
        files = sorted(self.path.glob(f"{pair}*.csv"))[-1:]
        if not files:
            return {}
        self.used += files
        with files[0].open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["prompt_tokens"] == prompt and row["kv"] == kv]
        return {row["mode"]: row for row in rows}

    def verify_curves(self, pattern):
        return [json.loads(path.read_text()) for path in self.files(pattern)]

    def bench(self, pattern):
        """Tokens/s of llama-bench by (rows, generated tokens): medians over files."""
        speeds = {}
        for path in self.files(pattern):
            for test in json.loads(path.read_text()):
                key = (int(test["n_prompt"]), int(test["n_gen"]))
                speeds.setdefault(key, []).append(float(test["avg_ts"]))
        return {key: median(values) for key, values in speeds.items()}

    def batched(self, pattern):
        """Milliseconds of a llama-batched-bench forward pass by number of sequences, one row each: medians over files."""
        times = {}
        for path in self.files(pattern):
            rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in path.read_text().splitlines()]
            names = rows[0]
            for row in (dict(zip(names, row)) for row in rows[2:]):
                times.setdefault(int(row["B"]), []).append(1e3 * float(row["T_TG s"]) / int(row["TG"]))
        return {rows: median(values) for rows, values in times.items()}

    def depths(self, pattern):
        """Milliseconds of one row and of four by (depth, K/V): medians over files."""
        times = {}
        for path in self.files(pattern):
            for line in path.read_text().splitlines():
                one = json.loads(line)
                times.setdefault((one["depth"], one["kv"]), []).append((one["step_ms"], one["four_rows_ms"]))
        return {key: tuple(median(column) for column in zip(*values)) for key, values in times.items()}

    def links(self):
        """Links to the files that were used; several runs are linked as one pattern."""
        names = {}
        for path in self.used:
            names.setdefault(re.sub(r"-\d(\.json|\.txt)$", r"-*\1", path.name), []).append(path)
        one = lambda name, paths: f"[{name}]({(paths[0] if len(paths) == 1 else self.path).relative_to(ROOT)})"
        return ", ".join(one(*item) for item in names.items())


def significant(speed):
    """With three significant digits."""
    return f"{speed:.0f}" if speed >= 99.95 else f"{speed:.1f}" if speed >= 9.995 else f"{speed:.2f}"


COLUMNS = ["off", "B = 2", "B = 4", "B = 6", "planner"]
HEADINGS = {"off": "plain"}


def ours(rows, planner="mtp"):
    """Cells of one of our matrices; `planner` is the mode that leaves the draft length to the planner."""

    def cell(column):
        row = rows.get(planner if column == "planner" else column)
        if row is None:
            return ""
        speed = significant(float(row["tokens_per_second"]))
        return speed if column == "off" else f"{speed} ({float(row['times_off']):.2f}x)"

    return [cell(column) for column in COLUMNS]


def theirs(rows):
    """Cells of a peer's servers, by rows per verification."""
    cells = {}
    for mode, row in rows.items():
        if not mode.startswith("llama.cpp"):
            continue
        drafts = re.search(r"n[-_]max[ =](\d+)", mode)
        # llama.cpp's draft-mtp drafts three tokens by default.
        drafts = int(drafts[1]) if drafts else 3 if "mtp" in mode else 0
        cells[f"B = {drafts + 1}" if drafts else "off"] = float(row["tokens_per_second"])
    if not cells:
        return None
    off = cells.get("off")
    said = lambda c: "" if c not in cells else significant(cells[c]) + (f" ({cells[c] / off:.2f}x)" if off and c != "off" else "")
    return [said(column) for column in COLUMNS]


def speed(record):
    """The table: our pairs, then the peers on the same file."""
    lines = [f"| tokens/s, 1 thread of {record.title()} | " + " | ".join(HEADINGS.get(c, c) for c in COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    e2b, ik = record.matrix("e2b-matrix"), record.matrix("e2b-ik-matrix")
    rows = [
        ("demo pair, held-out Rust prompts", ours(record.matrix("demo-matrix"), planner="auto")),
        ("E2B shapes, Q4_K mix, every draft accepted", ours(e2b)),
        ("same, at the acceptance of 31B: .92 .78 .67 .57", ours(record.matrix("e2b-acceptance-31b"))),
    ]
    for rate in ["0.9", "0.8", "0.7"]:
        rows.append((f"same, at an acceptance of {rate}", ours(record.matrix(f"e2b-acceptance-{rate}"))))
    rows.append(("llama.cpp, same file, every draft accepted", theirs(e2b)))
    rows.append(("ik_llama.cpp, same file, every draft accepted", theirs(ik)))
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows if cells and any(cells)]
    return "\n".join(lines) + "\n\nRaw files: " + record.links() + "."


def passes(record):
    """Cost of verifying several rows, share of the peak bandwidth, and prompt processing."""
    # If a record has several states of the code, the last one.
    runs = [path.name.rsplit("-", 1)[0] for path in record.path.glob("e2b-verify-curve-*.json") if "before" not in path.name]
    by_number = lambda run: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", run)]
    curves = record.verify_curves(f"{max(runs, key=by_number)}-[0-9].json")
    v = lambda rows: median(curve["v"][rows - 1] for curve in curves)
    share = median(curve["step_bytes"] / curve["ms"][0] / 1e6 / curve["read_gb_per_second"] for curve in curves)
    prompt = median(curve["prefill_512_tokens_per_second"] for curve in curves)
    text = (
        f"A forward pass of E2B over 2, 4, 8 and 16 rows takes {v(2):.2f}, {v(4):.2f}, {v(8):.2f} and {v(16):.2f} times as long "
        f"as over one row, which reads the weights at {100 * share:.0f} % of the best measured read bandwidth; a prompt of 512 tokens "
        f"is processed at {significant(prompt)} tokens/s."
    )
    for name, peer in [("ik_llama.cpp", "ik"), ("llama.cpp", "llama")]:
        times, bench = record.batched(f"e2b-{peer}-batched-*.txt"), record.bench(f"e2b-{peer}-bench-*.json")
        if times and bench:
            own = lambda rows: median(curve["ms"][rows - 1] for curve in curves)
            slower = [f"{times[rows] / own(rows):.2f}" for rows in (1, 2, 4, 6, 8, 16)]
            text += (
                f" {name} takes {', '.join(slower[:-1])} and {slower[-1]} times as long as foretoken for 1, 2, 4, 6, 8 and 16 rows "
                f"with logits, and processes prompts at {significant(bench[(max(rows for rows, _ in bench), 0)])} tokens/s."
            )
    return text + f" ({record.links()})"


def depth(record):
    """Decode steps deep in a context."""
    times = record.depths("e2b-depth*.json")
    deepest = max(positions for positions, _ in times)
    (f16, f16_four), (balanced, balanced_four) = times[deepest, "f16"], times[deepest, "balanced"]
    text = (
        f"After {deepest} positions, a decode step takes {f16:.0f} ms (`f16` KV cache) or {balanced:.0f} ms (`balanced`); "
        f"verifying four rows takes {f16_four / f16:.2f} and {balanced_four / balanced:.2f} times as long."
    )
    peers = {name: record.bench(files) for name, files in [("ik_llama.cpp (`q8_0`)", "e2b-ik-depth.json"), ("llama.cpp (`f16`)", "e2b-llama-depth.json")]}
    peers = {name: next(iter(bench.values())) for name, bench in peers.items() if bench}
    if peers:
        near = min(positions for positions, _ in times)
        own = [f"{significant(1e3 / times[near, kv][0])} (`{kv}`)" for kv in ["f16", "balanced"]]
        text += f" After {near} positions: {own[0]} and {own[1]} tokens/s; " + ", ".join(
            f"{name} {significant(tokens)}" for name, tokens in peers.items()
        )
        text += "; all with the same file, whose key norm weights are 0.125 instead of 1."
    return text + f" ({record.links()})"


def bf16(record):
    """Sixteen rows of floating-point weights, with AMX and without."""
    cost = lambda pattern: re.search(r"^ +16 +\S+ +(\S+)", record.files(pattern)[-1].read_text(), re.MULTILINE)[1]
    tiles, vectors = cost("e2b-bf16-verify-curve-?.txt"), cost("e2b-bf16-verify-curve-?-before.txt")
    return f"With E2B in bf16, sixteen rows take {tiles} times as long as one row with AMX, {vectors} times without ({record.links()})."


def before_and_after(record, state, rows):
    """How much longer a forward pass over `rows` rows took before `state` of the code: medians of runs."""
    ms = lambda pattern: median(curve["ms"][rows - 1] for curve in record.verify_curves(pattern))
    after, before = ms(f"e2b-verify-curve-{state}-?.json"), ms(f"e2b-verify-curve-{state}-before-?.json")
    files = f"`{record.path.name}/e2b-verify-curve-{state}-*.json`"
    return f"{100 * (before / after - 1):.0f} % longer (record: {files})"


def order_barrier(record):
    """One row, before the compiler barrier in the quantized products."""
    return before_and_after(record, 4, 1)


def prefetch_in_turn(record):
    """Six rows, before the prefetches of four panels were interleaved."""
    return before_and_after(record, 5, 6)


def key_mean(record):
    """Errors of biased keys quantized to 4 bits, with and without subtracting a page's mean."""
    text = record.files("kv-quality-synthetic.txt")[-1].read_text()
    lines = [line.split() for line in text.splitlines()]
    # Columns: gaussian, bias 2, bias 8, heavy tails, drifting bias 8.
    of_bias_8 = {words[0]: float(words[3]) for words in lines if words and words[0] in ("tqc4", "turbo4")}
    return f"error {of_bias_8['tqc4']:.3f} at 4 bits instead of {of_bias_8['turbo4']:.2f}; record: `{record.path.name}/{record.used[-1].name}`"


def acceptance(record):
    """How often the demo pair's drafts are accepted."""
    sets = json.loads(record.files("demo-evaluate.json")[-1].read_text())
    percent = lambda name: f"{100 * sets[name]['acceptance']:.0f} %"
    return (
        f"With three drafts per round, {percent('prompts.json')} of the drafts are accepted on the shipped prompts, "
        f"{percent('heldout')} in random windows of held-out files, and {percent('heldout_crates')} in windows of crates outside "
        f"the training set ({record.links()})."
    )


KINDS = {
    "acceptance": acceptance,
    "speed": speed,
    "passes": passes,
    "depth": depth,
    "bf16": bf16,
    "order-barrier": order_barrier,
    "prefetch-in-turn": prefetch_in_turn,
    "key-mean": key_mean,
}


def filled(match):
    kind, name, inner = match.groups()
    if kind not in KINDS:
        sys.exit(f"figures:begin {kind}: is not a kind; the kinds are {', '.join(KINDS)}")
    # A block on lines of its own, or inline: a line that begins with a comment would end the paragraph.
    margin = "\n" if inner.startswith("\n") else ""
    return f"<!-- figures:begin {kind} {name} -->{margin}{KINDS[kind](Record(name))}{margin}<!-- figures:end -->"


def complaints(name, text, wanted):
    for number, (is_, must) in enumerate(zip(text.splitlines(), wanted.splitlines()), 1):
        if is_ != must:
            yield f"{name}:{number}: says\n    {is_}\nthe record gives\n    {must}\n  fix: scripts/readme_figures.sh"
    if len(text.splitlines()) != len(wanted.splitlines()):
        yield f"{name}: has {len(text.splitlines())} lines, the record gives {len(wanted.splitlines())}; run scripts/readme_figures.sh"
    if text.count("figures:begin") != len(BLOCK.findall(text)):
        yield f"{name}: a figures:begin lacks figures:end, or KIND and RECORD"
    bare = BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    for number, line in enumerate(bare.splitlines(), 1):
        if SPEED.search(line):
            yield f"{name}:{number}: quotes a speed outside of figures:begin: {line.strip()}"


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit("usage: scripts/readme_figures.sh [--check]")
    wrong = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        wanted = BLOCK.sub(filled, text)
        if sys.argv[1:]:
            wrong += complaints(name, text, wanted)
        elif wanted != text:
            (ROOT / name).write_text(wanted)
            print(f"{name}: written")
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
