#!/usr/bin/env python3
"""Lists import cycles among the files of a crate.

    scripts/import_cycles.py kernels/src gpu/src

An import is a path that begins with `crate`, `super`, `self` or a child module, in a `use` or in code; it leads to the
file of the longest prefix that is a module. So a parent that re-exports an item of a child, and a child that uses anything through
`super::`, form a cycle; `mod child;` alone is not an import. Comments, strings and `#[cfg(test)]` modules do not count.
"""
import re
import sys
from pathlib import Path

# What is not an import: line comments (with doc comments), `pub(in ...)`, block comments, strings, characters (not lifetimes).
NOT_CODE = re.compile(r"""//[^\n]*|\(in [\w:]+\)|/\*.*?\*/|r(#*)".*?"\1|"(?:\\.|[^"\\])*"|'(?:\\.[^']*|[^'\\])'""", re.DOTALL)
INLINE = re.compile(r"\bmod\s+(\w+)\s*\{")
CHILD = re.compile(r"\bmod\s+(\w+)\s*;")
USE = re.compile(r"\buse\s+([^;]+);")
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
    """The paths of a `use`: `a::{b, c::{d, e}}` is a::b, a::c::d, a::c::e."""
    tree = re.sub(r"\s+as\s+\w+", "", tree).strip()
    brace = tree.find("{")
    if brace < 0:
        return [tree]
    prefix, inner = tree[:brace], tree[brace + 1 : tree.rfind("}")]
    parts, depth, start = [], 0, 0
    for i, c in enumerate(inner + ","):
        depth += {"{": 1, "}": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append(inner[start:i].strip())
            start = i + 1
    return [prefix + path for part in parts if part for path in use_paths(part)]


def module_of(root, file):
    parts = list(file.relative_to(root).with_suffix("").parts)
    if parts[-1] in ("lib", "main", "mod"):
        parts.pop()
    return tuple(parts)


def imports(text, module, modules):
    """Pairs of a line and the module that a path on it refers to."""
    inline = [(m.start(), closing(text, m.end() - 1), m.group(1)) for m in INLINE.finditer(text)]
    children = {m.group(1) for m in CHILD.finditer(text)}
    found = []
    uses = [(m.start(1), path) for m in USE.finditer(text) for path in use_paths(m.group(1))]
    code = USE.sub(blank, text)
    for at, path in uses + [(m.start(), m.group(1)) for m in PATH.finditer(code)]:
        parts = [part.strip() for part in path.split("::") if part.strip() not in ("", "*")]
        within = list(module) + [name for start, end, name in inline if start < at <= end]
        if parts[0] == "crate":
            target, parts = [], parts[1:]
        elif parts[0] in ("self", "super"):
            target = within
            while parts and parts[0] in ("self", "super"):
                target = target[:-1] if parts[0] == "super" else target
                parts = parts[1:]
        elif parts[0] in children and len(parts) > 1 and within == list(module):
            target = within
        else:
            continue
        target = tuple(target) + tuple(parts)
        while target not in modules and target:
            target = target[:-1]
        if target != module:
            found.append((text.count("\n", 0, at) + 1, target))
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
        files = {module_of(root, file): file for file in sorted(root.rglob("*.rs"))}
        found = {}
        for module, file in files.items():
            text = without_tests(NOT_CODE.sub(blank, file.read_text()))
            found[module] = imports(text, module, files)
        for cycle in cycles({module: {to for _, to in found[module]} for module in files}):
            count += 1
            print(f"cycle of {len(cycle)} files:")
            for module in sorted(cycle):
                for line, to in sorted(set(found[module])):
                    if to in cycle:
                        print(f"  {files[module]}:{line} imports from {files[to]}")
    if count:
        sys.exit(f"{count} import cycles")


main()
