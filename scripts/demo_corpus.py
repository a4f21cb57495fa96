#!/usr/bin/env python3
"""The corpus of the demo pair: the crates of demo_corpus.tsv, downloaded through cargo and checked.

    pip install numpy
    python scripts/demo_corpus.py corpus   # target/train_demo/corpus.jsonl: one file of a crate per line, with its split
    python scripts/demo_corpus.py notices  # target/train_demo/NOTICES.txt: the licence texts of the training crates

The splits: `train`; `heldout`, files of the training crates chosen by a hash; `heldout_crates`, the files of crates that are not in
the training set, without near-duplicates of training text.

A line of demo_corpus.tsv names a role (train or heldout), a crate, its version, the SHA-256 of its .crate file, as in any
Cargo.lock that has the crate, and the licence in its Cargo.toml, which must allow MIT or Apache-2.0 alone.
"""
import argparse, collections, hashlib, json, os, re, subprocess, sys, tarfile, textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = Path(__file__).with_name("demo_corpus.tsv")
WORK = ROOT / "target/train_demo"


# -------------------------------------------------------------------------------------------------------- manifest
class Crate(NamedTuple):
    role: str
    name: str
    version: str
    sha256: str
    licence: str


def permissive(licence):
    """Whether an SPDX expression allows using MIT or Apache-2.0 alone."""
    return " AND " not in licence and any(t.strip() in ("MIT", "Apache-2.0") for t in re.split(r" OR |/", licence))


def manifest():
    """The crates by role, training first, then by name and version: the order in which files enter the corpus."""
    lines = [line.split("\t") for line in MANIFEST.read_text().splitlines() if not line.startswith("#")]
    crates = [Crate(*fields) for fields in lines]
    for c in crates:
        if c.role not in ("train", "heldout") or not permissive(c.licence):
            sys.exit(f"{MANIFEST}: {c.name} {c.version}: role {c.role!r}, licence {c.licence!r}: "
                     "want train or heldout, and a licence that allows MIT or Apache-2.0 alone")
    both = {c.name for c in crates if c.role == "train"} & {c.name for c in crates if c.role == "heldout"}
    if both:
        sys.exit(f"{MANIFEST}: {sorted(both)} are both train and heldout: choose one role per crate")
    return sorted(crates, key=lambda c: (c.role != "train", c.name, c.version))


# -------------------------------------------------------------------------------------------------------- download
def compatible(version):
    """What two versions share that cannot be in one Cargo.lock: their leftmost part that is not 0."""
    return re.match(r"[1-9]\d*|0\.[1-9]\d*|0\.0\.\d+", version)[0]


def download(work, crates):
    """Fetches every crate into cargo's cache and returns the verified .crate file of each.

    A throw-away package depends on exactly these versions; a Cargo.lock written beforehand tells cargo the checksums, and
    lets it take versions that were yanked since. Versions that exclude each other, and roles, go to packages of their own.
    """
    packages, number = collections.defaultdict(list), collections.Counter()
    for c in crates:
        kind = c.role, c.name, compatible(c.version)
        packages[c.role, number[kind]].append(c)
        number[kind] += 1
    source = re.search(r'^source = "registry\+.*"$', (ROOT / "Cargo.lock").read_text(), re.M)[0]  # crates.io
    for (role, n), members in packages.items():
        package = work / "fetch" / f"{role}-{n}"
        (package / "src").mkdir(parents=True, exist_ok=True)
        (package / "src/lib.rs").touch()
        toml, lock = '[package]\nname = "fetch"\nversion = "0.0.0"\n\n[workspace]\n\n[dependencies]\n', "version = 4\n"
        for i, c in enumerate(members):
            exact = c.version.split("+")[0]
            toml += f'd{i} = {{ package = "{c.name}", version = "={exact}", default-features = false }}\n'
            lock += f'\n[[package]]\nname = "{c.name}"\nversion = "{c.version}"\n{source}\nchecksum = "{c.sha256}"\n'
        (package / "Cargo.toml").write_text(toml)
        (package / "Cargo.lock").write_text(lock)
        if subprocess.run(["cargo", "fetch", "--quiet"], cwd=package).returncode:
            sys.exit(f"cargo fetch failed in {package}: a crate of {MANIFEST} is missing there or has changed")
    cache = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo")) / "registry/cache"
    found = {}
    for c in crates:
        copies = list(cache.glob(f"*/{c.name}-{c.version}.crate"))
        sums = [hashlib.sha256(f.read_bytes()).hexdigest() for f in copies]
        if c.sha256 not in sums:
            sys.exit(f"{cache}: no {c.name}-{c.version}.crate with the checksum {c.sha256} of {MANIFEST.name}, "
                     f"but {sums}: remove it and start again")
        found[c] = copies[sums.index(c.sha256)]
    return found


def files(path):
    """(path in the crate, bytes) of every regular file, sorted by the parts of its path."""
    with tarfile.open(path) as archive:
        members = [(m.name.split("/")[1:], m) for m in archive if m.isfile()]
        for parts, member in sorted(members, key=lambda pair: pair[0]):
            yield "/".join(parts), archive.extractfile(member).read()


# ---------------------------------------------------------------------------------------------------------- corpus
# Generated bindings and tables.
SKIP_PATH = re.compile(
    r"(^|/)(generated|gen|test-macros|bindings?|tables?|unicode_tables|unicode_data)(/|[^/]*\.rs$)|data/")


def wanted(text):
    lines = text.split("\n")
    return (len(text) >= 200 and max(map(len, lines)) <= 500
            and sum(c.isdigit() for c in text) < 0.12 * len(text))


def documents_of(crates, found):
    """The texts of the corpus, each once, as the records of corpus.jsonl."""
    seen = set()
    for c in crates:
        for rel, data in files(found[c]):
            if not rel.endswith((".rs", ".md")) or SKIP_PATH.search(rel) or len(data) > 200_000:
                continue
            try:
                text = data.decode().replace("\r\n", "\n")
            except UnicodeDecodeError:
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen or not wanted(text):
                continue
            seen.add(digest)
            # Keyed without the version, so that a file's near-copies in two versions fall on the same side.
            key = hashlib.sha256(f"{c.name}/{rel}".encode()).digest()
            split = "heldout_crates" if c.role == "heldout" else "heldout" if key[0] < 5 else "train"  # 5/256, about 2 %
            yield dict(crate=c.name, version=c.version, path=rel, split=split, text=text)


# --------------------------------------------------------------------------------------------------- near-duplicates
SHINGLE = 32  # consecutive words or punctuation marks; white space does not count
CONTAINMENT = 0.1  # a text is a near-duplicate above this share of its shingles
WORD = re.compile(r"\w+|[^\w\s]")


def shingles(text, numbers):
    """The distinct 64-bit hashes of a text's shingles, sorted.  `numbers` gives every word its number."""
    x = np.array([numbers.setdefault(w, len(numbers) + 1) for w in WORD.findall(text)], dtype=np.uint64)
    # SplitMix64's finalizer, then a polynomial, all modulo 2^64.
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    h = np.zeros(max(0, len(x) - SHINGLE + 1), dtype=np.uint64)
    for j in range(SHINGLE):
        h = h * np.uint64(0x2545F4914F6CDD1D) + x[j: j + len(h)]
    return np.unique(h)


def containments(documents):
    """For every document outside `train`, by index, the share of its shingles that training text has."""
    numbers = {}
    hashes = [shingles(d["text"], numbers) for d in documents]
    train = np.unique(np.concatenate([h for d, h in zip(documents, hashes) if d["split"] == "train"]))
    shares = {}
    for i, (d, h) in enumerate(zip(documents, hashes)):
        if d["split"] != "train":
            at = np.minimum(np.searchsorted(train, h), len(train) - 1)
            shares[i] = float((train[at] == h).mean()) if len(h) else 1.0  # too short to be judged: not kept
    return shares


def corpus(a):
    crates = manifest()
    documents = list(documents_of(crates, download(a.work, crates)))
    shares = containments(documents)
    removed = {i for i, share in shares.items() if share > CONTAINMENT and documents[i]["split"] == "heldout_crates"}
    with open(a.work / "corpus.jsonl", "w") as out:
        for i, d in enumerate(documents):
            if i not in removed:
                out.write(json.dumps(d | dict(near=shares.get(i, 0) > CONTAINMENT)) + "\n")
    for split in ("train", "heldout", "heldout_crates"):
        kept = [d for i, d in enumerate(documents) if d["split"] == split and i not in removed]
        size = sum(len(d["text"].encode()) for d in kept)
        print(f"{split}: {len(kept)} files, {size / 1e6:.1f} MB, {len({(d['crate'], d['version']) for d in kept})} crates")
    near = sum(share > CONTAINMENT for i, share in shares.items() if documents[i]["split"] == "heldout")
    print(f"near-duplicates of training text (more than {CONTAINMENT:.0%} of their {SHINGLE}-word shingles): "
          f"{len(removed)} files of heldout_crates, removed; {near} of heldout, kept")
    for i in sorted(removed):
        print(f"  {documents[i]['crate']} {documents[i]['path']}: {shares[i]:.0%}")


def documents(work):
    """The records of corpus.jsonl: crate, version, path, split, text; near: a near-duplicate of training text."""
    with open(work / "corpus.jsonl") as f:
        yield from map(json.loads, f)


# --------------------------------------------------------------------------------------------------------- notices
NOTICE_FILE = re.compile(r"(?i)(^|/)(licen[cs]e|copying|copyright|notice|unlicense|authors)[^/]*$")
# Not "copyright notice" or "copyright holders", which are part of the licence texts.
COPYRIGHT = re.compile(r"^\W*(?:Portions )?[Cc]opyright (?:\([cC]\)|©|\[?\d|(?:The |Individual |Mozilla )\w)")
NOTICES_HEAD = """\
Licence texts and notices of the crates that the demo pair was trained on (scripts/demo_corpus.tsv, role train): every file
of their packages whose name begins with LICENSE, COPYING, COPYRIGHT, NOTICE, UNLICENSE or AUTHORS.  Texts that differ only
in copyright lines, white space, punctuation, a title, or in what follows the terms of the Apache License stand once,
without these lines, under the list of their crates and copyright lines.

Written by `python scripts/demo_corpus.py notices`.
"""


def copyright_lines(text):
    """The indices of a text's copyright lines, with the next line where the name stands there."""
    lines, at = text.split("\n"), set()
    for i, line in enumerate(lines):
        if COPYRIGHT.match(line):
            at.add(i)
            if not re.search(r"[A-Za-z]{2}", re.sub("(?i)copyright", "", line)) and i + 1 < len(lines):
                at.add(i + 1)
    return at


def licence_key(text):
    """The key shared by texts of one licence."""
    key = " ".join(re.findall(r"\w+", text.lower())).replace("https", "http")
    apache = re.fullmatch("(?:[a-z]+ )?apache license version 2 0.{,80}? (?=terms and conditions for)(.*)"
                          "end of terms and conditions( appendix how to apply the apache license.{,1500})?", key)
    return apache[1] if apache else re.sub("^(the )?mit license (mit )?", "", key)


def notices(a):
    crates = [c for c in manifest() if c.role == "train"]
    found, groups, without = download(a.work, crates), collections.defaultdict(list), []
    for c in crates:
        texts = {rel: data.decode(errors="replace").replace("\r\n", "\n") for rel, data in files(found[c])
                 if NOTICE_FILE.search(rel) and not rel.endswith(".rs")}
        texts = {rel: text for rel, text in texts.items() if "\n" in text.strip()}  # some hold the path of a lost link
        for rel, text in texts.items():
            lines, at = text.split("\n"), copyright_lines(text)
            body = "\n".join(line for i, line in enumerate(lines) if i not in at).strip("\n")
            owners = "; ".join(lines[i].strip() for i in sorted(at))
            groups[licence_key(body)].append((c, rel, owners, body, text.strip("\n")))
        if not texts:
            authors = dict(files(found[c]))["Cargo.toml"].decode()
            authors = re.search(r"^authors = \[(.*?)\]", authors, re.M | re.S)
            names = ", ".join(re.findall('"(.*?)"', authors[1])) if authors else "no authors named"
            without.append(f"{c.name} {c.version}: {c.licence}; {names}")
    rule, out = "=" * 120, [NOTICES_HEAD]
    out += ["Packages without such a file, with the licence and the authors in their Cargo.toml:\n"] + without
    for members in sorted(groups.values(), key=lambda m: (-len(m), m[0])):
        owners = collections.defaultdict(list)
        for c, rel, owner, body, text in members:
            owners[owner].append(f"{c.name} {c.version} ({rel})" if "/" in rel else f"{c.name} {c.version}")
        out += ["", rule]
        alone = len(members) == 1  # then the text is the file, its copyright lines in their places
        for owner, names in sorted(owners.items()):
            line = ", ".join(names) + ("" if alone or not owner else f": {owner}")
            out += textwrap.wrap(line, 120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        out += [rule, "", members[0][4 if alone else 3]]
    path = a.work / "NOTICES.txt"
    path.write_text("\n".join(out) + "\n")
    print(f"{path}: {sum(map(len, groups.values()))} files as {len(groups)} texts, {path.stat().st_size} bytes; "
          f"{len(without)} packages without one")


STAGES = [corpus, notices]

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("stages", nargs="+", choices=[s.__name__ for s in STAGES])
    p.add_argument("--work", type=Path, default=WORK, help="output directory")
    a = p.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    for name in a.stages:
        globals()[name](a)
