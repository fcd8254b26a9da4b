"""Small changes of source code, each of which some test should notice.

A mutation is a piece of text in the place of another one. It is named by its file, the function
that it is in, and the two texts, so that a list of mutations stays true when lines move.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_LETTERS = 70
_NOTHING = "pass"
_LARGE = 16
"""From here on, a number that is one more or less is as good."""
_COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_ANY_ORDER = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "min", "max"}
"""Functions of which swapped arguments say nothing: an error of Python, or the same."""
_DROPPED = (ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)


@dataclass(frozen=True)
class Mutation:
    """One change of one file.

    Attributes:
        scope: the function or class that it is in, as ``Class.method``; empty outside of any.
        before, after: the two texts, on one line each.
        nth: which of those with the same texts in the same scope it is, from 1.
        line: where it begins.
        start, stop: the bytes of the file that are replaced.
    """

    scope: str
    before: str
    after: str
    nth: int
    line: int
    start: int
    stop: int

    @property
    def change(self) -> str:
        """The change in one line, which stays the same when lines move."""
        again = f" (#{self.nth})" if self.nth > 1 else ""
        return f"{_shortened(self.before)} → {_shortened(self.after)}{again}"

    def applied(self, source: str) -> str:
        """The source with this change."""
        raw = source.encode()
        after = self.after if self.after == _NOTHING else f"({self.after})"
        return (raw[: self.start] + after.encode() + raw[self.stop :]).decode()


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"


def mutations_of(source: str) -> list[Mutation]:
    """All mutations of a file, in the order of its lines. What is only said is left alone: texts,
    annotations, decorators and assertions."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: list[Mutation] = []
    times: Counter[tuple[str, str, str]] = Counter()
    for scope, node, after in _changes(ast.parse(source), ""):
        if not scope and isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            continue  # the name of a type
        start = lines[node.lineno - 1] + node.col_offset
        stop = lines[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(source.encode()[start:stop].decode().split())
        as_told = scope, _shortened(before), _shortened(after)
        times[as_told] += 1
        nth = times[as_told]
        found.append(Mutation(scope, before, after, nth, node.lineno, start, stop))
    return found


def _changes(tree: ast.AST, scope: str) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """(scope, what is replaced, by what text) of every mutation inside of a node."""
    for node in _children(tree):
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{node.name}" if scope else node.name
        if isinstance(node, ast.expr):
            changed = _calls(node) if isinstance(node, ast.Call) else _expressions(node)
            yield from ((scope, node, ast.unparse(new)) for new in changed)
        if isinstance(node, ast.stmt) and _may_be_dropped(node):
            yield scope, node, _NOTHING
        if not isinstance(node, ast.Raise):
            yield from _changes(node, inner)
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            test = node.test
            if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
                yield scope, test, f"not {ast.unparse(test)}"


def _children(tree: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that do something."""
    for name, value in ast.iter_fields(tree):
        if name in (
            "annotation",
            "returns",
            "decorator_list",
            "format_spec",
            "bases",
            "type_params",
        ):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.Assert | ast.JoinedStr) or not isinstance(node, ast.AST):
                continue
            # Sequences that are gone through together are as long as each other, as far as anybody
            # can know.
            if isinstance(node, ast.keyword) and node.arg == "strict":
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            yield node


def _may_be_dropped(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return any(isinstance(one, ast.Attribute | ast.Subscript) for one in node.targets)
    return isinstance(node, _DROPPED)


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    """What may stand in the place of an expression."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            for other in _COMPARISONS[type(operator)]:
                ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        if not any(isinstance(one, ast.JoinedStr) or _text(one) for one in (node.left, node.right)):
            yield ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant):
        yield from map(ast.Constant, _constants(node.value))


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _constants(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float) or (isinstance(value, int) and value > _LARGE):
        return [2 * value or 1.0]
    return [value + 1, value - 1] if isinstance(value, int) else []


def _calls(node: ast.Call) -> Iterator[ast.Call]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _NAMES:
        yield ast.Call(ast.Name(_NAMES[name]), node.args, node.keywords)
    if name in _ANY_ORDER or any(isinstance(one, ast.Starred) for one in node.args):
        return
    for place in range(len(node.args) - 1):
        args = [*node.args]
        args[place : place + 2] = reversed(args[place : place + 2])
        if ast.unparse(args[place]) != ast.unparse(args[place + 1]):
            yield ast.Call(node.func, args, node.keywords)
