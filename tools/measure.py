"""The size of the house: what somebody must hold in mind, printed by ``make lint``.

    python -m tools.measure [--names] [--strict]

Statements are those of the syntax tree, without docstrings. A module's importers are the files of
the package that import it. Class names that are used twice, names of the glossary and long
definitions are listed, since there should be none: a class name says one thing in the whole
package, a name says what it holds, a definition fits a screen. With ``--strict``, the exit status
is 1 where there are such names.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "src" / "penstock"
LONGEST = 40
"""Lines of a definition, docstring and blank lines included in what ``ast`` counts of its body but
not its docstring."""

VARIABLES: Mapping[str, str] = {
    "one": "the name of the element, as entry, stage or path",
    "found": "the name of what was looked for, as plan, match or best",
    "told": "message, words, text or note",
    "what": "the name of the subject, as name, kind or role",
    "thing": "the name of the value, as schedule or source",
    "stuff": "the name of what it holds",
}
"""Names of variables and arguments that say nothing of what they hold, and what says it."""

CLASSES: Mapping[str, str] = {
    "Doorway": "Listener",
    "Elsewhere": "RemoteStages",
    "Guests": "PendingConnections",
    "Harvest": "StepResult",
    "Held": "one word for replicas that share a parameter",
    "HeldBack": "one word for replicas that share a parameter, or that something is deferred",
    "Holders": "one word for replicas that share a parameter",
    "Holding": "one word for replicas that share a parameter",
    "Invitation": "Credentials",
    "Known": "a cache, and of what",
    "Lane": "IOThread",
    "Letter": "PendingGradients",
    "Mail": "a queue of pending gradients",
    "Outside": "remote stages",
    "Residence": "Residency",
    "Rooms": "MemoryLimits",
    "Seal": "Digest",
    "Settling": "weight swapping: load and evict",
    "Shelf": "a store",
    "Slab": "a buffer",
    "StandIns": "Placeholders",
    "Stay": "a residency",
    "Twins": "TiedParameters",
    "Void": "PoisonValue",
    "Way": "a transfer, a mode, a direction: which way it is",
    "Wish": "PlanRequest",
}
"""Names of classes in words of our own, and the field's words; an underscore does not count."""


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


class ForbiddenName(NamedTuple):
    """A name that the glossary replaces.

    Attributes:
        module: the file's module.
        line: where the name is given.
        kind: ``"variable"`` or ``"class"``.
        name: as it is written.
        instead: the glossary's word.
    """

    module: str
    line: int
    kind: str
    name: str
    instead: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.kind} {self.name}; use {self.instead}"


def forbidden_names(known: list[File]) -> list[ForbiddenName]:
    """The variables, arguments and classes whose names are in the glossary."""
    return [
        ForbiddenName(file.module, line, kind, name, glossary[name.lstrip("_")])
        for file in known
        for node in ast.walk(file.tree)
        for line, kind, name, glossary in _names_given(node)
        if name.lstrip("_") in glossary
    ]


def _names_given(node: ast.AST) -> Iterator[tuple[int, str, str, Mapping[str, str]]]:
    """(line, kind, name, glossary) of each name that a node of the syntax tree gives."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.lineno, "variable", node.id, VARIABLES
    elif isinstance(node, ast.arg):
        yield node.lineno, "variable", node.arg, VARIABLES
    elif isinstance(node, ast.ClassDef):
        yield node.lineno, "class", node.name, CLASSES


def _size(known: list[File]) -> Iterator[str]:
    """Statements by wing, and the files that have most."""
    wings: Counter[str] = Counter()
    for file in known:
        wing = file.module.split(".")[1:2] or ["(front)"]
        wings[wing[0]] += file.statements
    used_by = importers(known)
    largest = sorted(known, key=lambda file: -file.statements)[:5]
    shares = ", ".join(f"{wing} {count:,}" for wing, count in wings.most_common() if count > 99)
    yield f"{sum(wings.values()):,} statements in {len(known)} files: {shares}"
    yield "largest: " + ", ".join(
        f"{file.module.removeprefix('penstock.')} {file.statements} "
        f"(imported by {len(used_by[file.module])})"
        for file in largest
    )
    alone = sum(len(used_by[file.module]) == 1 for file in known)
    yield f"{alone} files with one importer"


def main() -> None:
    """Print what stands in the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="list names, too")
    parser.add_argument("--strict", action="store_true", help="fail where there are such names")
    options = parser.parse_args()
    known = list(files())
    several, long, forbidden = class_names(known), long_definitions(known), forbidden_names(known)
    for line in _size(known):
        print(line)
    print(
        f"{len(several)} class names used twice, {len(long)} definitions over {LONGEST} lines, "
        f"{len(forbidden)} names of the glossary"
    )
    fails = options.strict and bool(several or forbidden)
    if options.names or fails:
        for name, places in several.items():
            print(f"  class {name} is in {', '.join(places)}; let all but one say which it is")
        for definition in long:
            print(f"  {definition}")
        for entry in forbidden:
            print(f"  {entry}")
    sys.exit(fails)


if __name__ == "__main__":
    main()
