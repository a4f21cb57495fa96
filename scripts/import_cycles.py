#!/usr/bin/env python3
"""Lists import cycles among the files of a crate.

    scripts/import_cycles.py kernels/src gpu/src src server/src tools/src

An import is a path that begins with `crate`, `super`, `self` or a child module, in a `use` or in code. It leads to the file that
defines the item: re-exports are followed (`crate::Error` is src/error.rs), and a re-export is an import only of a file that also
uses the name itself. `mod child;` alone is not an import. Comments, strings and `#[cfg(test)]` modules do not count.
"""
import re
import sys
from pathlib import Path

# What is not an import: line comments (with doc comments), `pub(in ...)`, block comments, strings, characters (not lifetimes).
NOT_CODE = re.compile(r"""//[^\n]*|\(in [\w:]+\)|/\*.*?\*/|r(#*)".*?"\1|"(?:\\.|[^"\\])*"|'(?:\\.[^']*|[^'\\])'""", re.DOTALL)
INLINE = re.compile(r"\bmod\s+(\w+)\s*\{")
CHILD = re.compile(r"\bmod\s+(\w+)\s*;")
USE = re.compile(r"(\bpub(?:\((?:crate|super|self)\))?\s+)?\buse\s+([^;]+);")
PATH = re.compile(r"(?<![\w:$])((?:\w+::)+\w+)")


def blank(match):
    return re.sub(r"[^\n]", " ", match.group())


def closing(text, opening):
    depth = 0
    for i in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)


def without_tests(text):
    while match := re.search(r"#\[cfg\(test\)\]\s*(?:pub\s+)?mod\s+\w+\s*\{", text):
        end = closing(text, match.end() - 1)
        text = text[: match.start()] + blank(re.match(r".*", text[match.start() : end + 1], re.DOTALL)) + text[end + 1 :]
    return text


def use_paths(tree):
    """Paths and names of a `use`: `a::{b, c::{d, e as f}}` is (a::b, b), (a::c::d, d), (a::c::e, f)."""
    tree = tree.strip()
    brace = tree.find("{")
    if brace < 0:
        path, _, name = re.sub(r"(::self$|::\*$)", "", tree).partition(" as ")
        return [(path.strip(), name.strip() or path.split("::")[-1].strip())]
    prefix, inner = tree[:brace], tree[brace + 1 : tree.rfind("}")]
    parts, depth, start = [], 0, 0
    for i, c in enumerate(inner + ","):
        depth += {"{": 1, "}": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append(inner[start:i].strip())
            start = i + 1
    return [(re.sub(r"::self$", "", prefix + path), prefix.split("::")[-2] if name == "self" else name)
            for part in parts if part for path, name in use_paths(part)]


def module_of(root, file):
    parts = list(file.relative_to(root).with_suffix("").parts)
    if parts[-1] in ("lib", "main", "mod"):
        parts.pop()
    return tuple(parts)


class File:
    """A module's file: its imports, and the names that it hands on or uses from other modules."""

    def __init__(self, path, module):
        self.path, self.module = path, module
        self.text = without_tests(NOT_CODE.sub(blank, path.read_text()))
        self.inline = [(m.start(), closing(self.text, m.end() - 1), m.group(1)) for m in INLINE.finditer(self.text)]
        self.children = {m.group(1) for m in CHILD.finditer(self.text)}
        code = USE.sub(blank, self.text)
        self.names = set(re.findall(r"\w+", CHILD.sub(blank, code)))
        self.uses = {}  # name in this file -> the path that it stands for
        self.paths = []  # (offset, path, whether it is only handed on)
        for m in USE.finditer(self.text):
            for path, name in use_paths(m.group(2)):
                path = self.absolute(path, m.start(2))
                if path:
                    self.uses.setdefault(name, path)
                    self.paths.append((m.start(2), path, m.group(1) and name not in self.names))
        for m in PATH.finditer(code):
            path = self.absolute(m.group(1), m.start())
            if path:
                self.paths.append((m.start(), path, False))

    def absolute(self, path, at):
        """The parts of a path from the crate's root; `None` if it leads to another crate or begins with a local name."""
        parts = [part.strip() for part in path.split("::") if part.strip()]
        within = list(self.module) + [name for start, end, name in self.inline if start < at <= end]
        if parts[0] == "crate":
            return parts[1:]
        if parts[0] in ("self", "super"):
            while parts and parts[0] in ("self", "super"):
                within = within[:-1] if parts[0] == "super" else within
                parts = parts[1:]
            return within + parts
        if parts[0] in self.children and len(parts) > 1 and within == list(self.module):
            return within + parts
        return None


def resolve(parts, files, seen=()):
    """The module of the file that defines what `parts` names, through re-exports."""
    module = tuple(parts)
    while module and module not in files:
        module = module[:-1]
    rest = list(parts)[len(module) :]
    if rest and module not in seen and not defines(files[module], rest[0]):
        onward = files[module].uses.get(rest[0])
        if onward and tuple(onward) != tuple(parts):
            return resolve(onward + rest[1:], files, (*seen, (module, rest[0])))
    return module


def defines(file, name):
    return re.search(rf"\b(?:struct|enum|trait|fn|const|static|type|mod|union|macro_rules!)\s+{name}\b", file.text)


def imports(file, files):
    """Pairs of a line and the module that a path on it refers to."""
    found = []
    for at, path, handed_on in file.paths:
        target = resolve(path, files)
        if target != file.module and not handed_on:
            found.append((file.text.count("\n", 0, at) + 1, target))
    return found


def cycles(graph):
    """Strongly connected components of more than one module (Tarjan)."""
    index, low, stack, done, result = {}, {}, [], set(), []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other not in done:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = []
            while not component or component[-1] != node:
                component.append(stack.pop())
                done.add(component[-1])
            if len(component) > 1:
                result.append(set(component))

    for node in graph:
        if node not in index:
            visit(node)
    return result


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    sys.setrecursionlimit(10_000)
    count = 0
    for root in map(Path, sys.argv[1:]):
        files = {module: File(file, module) for file in sorted(root.rglob("*.rs")) for module in [module_of(root, file)]}
        found = {module: imports(file, files) for module, file in files.items()}
        for cycle in cycles({module: {to for _, to in found[module]} for module in files}):
            count += 1
            print(f"cycle of {len(cycle)} files:")
            for module in sorted(cycle):
                for line, to in sorted(set(found[module])):
                    if to in cycle:
                        print(f"  {files[module].path}:{line} imports from {files[to].path}")
    if count:
        sys.exit(f"{count} import cycles")


main()
