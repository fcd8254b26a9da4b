"""The size of the house: what somebody must hold in mind, printed by ``make lint``.

    python -m tools.measure [--names]

Statements are those of the syntax tree, without docstrings. A module's importers are the files of
the package that import it. Class names and long definitions are listed, since there should be none:
a class name says one thing in the whole package, a definition fits a screen.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "src" / "penstock"
LONGEST = 40
"""Lines of a definition, docstring and blank lines included in what ``ast`` counts of its body but
not its docstring."""
VAGUE = frozenset({"one", "found", "told", "what", "thing", "stuff"})
"""Names of variables that say nothing of what they hold."""


class File(NamedTuple):
    """A file of the package.

    Attributes:
        module: its dotted name.
        tree: its syntax.
        statements: how many, without docstrings.
    """

    module: str
    tree: ast.Module
    statements: int


def files() -> Iterator[File]:
    """The files of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        count = sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(tree))
        yield File(module, tree, count)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def importers(known: list[File]) -> dict[str, set[str]]:
    """For each module, the modules that import it or a name of it."""
    modules = {file.module for file in known}
    by_module: dict[str, set[str]] = defaultdict(set)
    for file in known:
        for node in ast.walk(file.tree):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for target in modules.intersection(targets):
                by_module[target].add(file.module)
    return by_module


def class_names(known: list[File]) -> dict[str, list[str]]:
    """The names that several classes have, and where these are."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in known:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(file.module)
    return {name: own for name, own in sorted(places.items()) if len(own) > 1}


def long_definitions(known: list[File]) -> list[str]:
    """The functions whose code, without the docstring, is longer than ``LONGEST`` lines."""
    long = []
    for file in known:
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            body = node.body[1:] if _is_text(node.body[0]) else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body and node.end_lineno else 0
            if lines > LONGEST:
                long.append(f"{file.module}.{node.name}: {lines}")
    return long


def vague_names(known: list[File]) -> Counter[str]:
    """How often variables have names that say nothing, by the modules that use them."""
    counts: Counter[str] = Counter()
    for file in known:
        for node in ast.walk(file.tree):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            if (stored and node.id in VAGUE) or (isinstance(node, ast.arg) and node.arg in VAGUE):
                counts[file.module] += 1
    return counts


def main() -> None:
    """Print what stands in the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="list names, too")
    options = parser.parse_args()
    known = list(files())
    wings: Counter[str] = Counter()
    for file in known:
        wing = file.module.split(".")[1:2] or ["(front)"]
        wings[wing[0]] += file.statements
    used_by = importers(known)
    several, long, vague = class_names(known), long_definitions(known), vague_names(known)
    largest = sorted(known, key=lambda file: -file.statements)[:5]
    print(f"{sum(wings.values()):,} statements in {len(known)} files:", end=" ")
    print(", ".join(f"{wing} {count:,}" for wing, count in wings.most_common() if count > 99))
    print("largest:", end=" ")
    print(
        ", ".join(
            f"{file.module.removeprefix('penstock.')} {file.statements} "
            f"(imported by {len(used_by[file.module])})"
            for file in largest
        )
    )
    alone = sum(len(used_by[file.module]) == 1 for file in known)
    print(
        f"{alone} files with one importer, {len(several)} class names used twice, "
        f"{len(long)} definitions over {LONGEST} lines, {vague.total()} vague names"
    )
    if options.names:
        for name, places in several.items():
            print(f"  {name}: {', '.join(places)}")
        for definition in long:
            print(f"  {definition}")
        for module, count in vague.most_common():
            print(f"  {module}: {count} vague")


if __name__ == "__main__":
    main()
