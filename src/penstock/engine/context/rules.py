"""Rules of recorded operations for positions that the members of a group share.

They are those of ``tensor.recorded_rules``, and more: a sequence is divided far from the features,
so linear maps, norms and lookups go along, and whatever works on one position by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from penstock.engine.tensor.recorded_rules import (
    RULES,
    Find,
    Known,
    Rule,
    ShardedDim,
    reshaped,
    shape_of,
)


def rule_of(node: fx.Node, known: Known, member: int) -> Rule | None:
    """The rule of an operation on what is divided; ``None`` if it may mix positions.

    Args:
        known: how values are divided that are.
        member: for whom arguments with sizes are.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        name = str(node.target._schema.name).removeprefix("aten::")
        is_pointwise = torch.Tag.pointwise in node.target.tags
    else:
        name, is_pointwise = getattr(node.target, "__name__", ""), False
    find = _OWN.get(name) or RULES.get(name)
    if find is None and is_pointwise:
        find = RULES["pointwise"]
    rule = None if find is None else find(node, known, member)
    if rule is None or rule.divided is None:
        return rule
    lengths = {known[value].length for value in node.all_input_nodes if value in known}
    # A view may cut what is divided in two; then positions of a member are no part of it.
    return rule if rule.divided.length in lengths else None


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _only(node: fx.Node, place: int, known: Known) -> tuple[ShardedDim, list[int]] | None:
    """How an argument is divided, and its shape; ``None`` unless it is, alone."""
    value = node.args[place] if len(node.args) > place else None
    others = [other for other in node.all_input_nodes if other is not value]
    if not isinstance(value, fx.Node) or value not in known or any(map(known.get, others)):
        return None
    shape = shape_of(value)
    return None if shape is None else (known[value], shape)


def _linear(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = _only(node, 0, known)
    if given is None or given[0].dim == len(given[1]) - 1:
        return None
    return Rule(given[0])


def _looked_up(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = _only(node, 1, known)
    # Gradients that are scaled by how often a word occurs would need the words of all.
    counts = bool(_argument(node, 3, "scale_grad_by_freq"))
    return None if given is None or counts else Rule(given[0])


def _normed(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = _only(node, 0, known)
    if given is None:
        return None
    over: Sequence[Any] = node.args[1]  # type: ignore[assignment]
    return Rule(given[0]) if given[0].dim < len(given[1]) - len(over) else None


def _multiplied(node: fx.Node, known: Known, member: int) -> Rule | None:
    """Rows times a whole matrix, a whole matrix times columns; or matrices that members have."""
    output = shape_of(node)
    for place, contracted in ((0, -1), (1, -2)):
        given = _only(node, place, known)
        if given is None or output is None:
            continue
        divided, shape = given
        from_last = divided.dim - len(shape)
        is_row_or_column = from_last in (-1, -2) and from_last != contracted and len(shape) > 1
        other = node.args[1 - place]
        flat = isinstance(other, fx.Node) and len(shape_of(other) or ()) == 2
        if is_row_or_column or (place == 0 and flat and from_last != contracted):
            return Rule(divided.at(from_last + len(output)))
    return RULES["matmul"](node, known, member)


def _added_product(node: fx.Node, known: Known, _: int) -> Rule | None:
    given, bias = _only(node, 1, known), node.args[0]
    if given is None or not isinstance(bias, fx.Node) or len(shape_of(bias) or (0, 0)) != 1:
        return None
    return Rule(given[0]) if given[0].dim == 0 else None


def _reduced(node: fx.Node, known: Known, _: int) -> Rule | None:
    """Over other dimensions than the one that is divided."""
    given, output = _only(node, 0, known), shape_of(node)
    place = 2 if "norm" in str(node.target) else 1
    dims = _argument(node, place, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    if given is None or output is None or not dims:
        return None
    divided, shape = given
    gone = {int(dim) % len(shape) for dim in dims}
    if divided.dim in gone:
        return None
    before = sum(dim < divided.dim for dim in gone) if len(output) < len(shape) else 0
    return Rule(divided.at(divided.dim - before))


def _sliced(node: fx.Node, known: Known, member: int) -> Rule | None:
    given = _only(node, 0, known)
    if given is None:
        return None
    divided, shape = given
    dim, start, stop, step = (
        _argument(node, place, name, default)
        for place, (name, default) in enumerate(
            (("dim", 0), ("start", None), ("end", None), ("step", 1)), 1
        )
    )
    numbers = all(isinstance(number, int | None) for number in (start, stop))
    takes_all = not start and (stop is None or (numbers and stop >= shape[divided.dim]))
    if dim % len(shape) == divided.dim:
        return Rule(divided) if takes_all and step == 1 else None
    return Rule(divided)


def _viewed(node: fx.Node, known: Known, member: int) -> Rule | None:
    """As tensor ranks see a value in another shape; sizes that are computed may stand beside."""
    rule = RULES["view"](node, known, member)
    given, output = _only(node, 0, known), shape_of(node)
    if rule is not None or given is None or output is None:
        return rule
    sizes: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(sizes, list | tuple) or any(size == -1 for size in sizes):
        return None
    divided = reshaped(*given, output)
    if divided is None or not isinstance(sizes[divided.dim], fx.Node):
        return None
    # The number of rows is in a size that is computed, for the whole: let torch find it.
    free = [-1 if dim == divided.dim else size for dim, size in enumerate(sizes)]
    return Rule(divided, (node.args[0], free))


def _stacked(node: fx.Node, known: Known, member: int) -> Rule | None:
    values: Sequence[Any] = node.args[0]  # type: ignore[assignment]
    if any(value not in known for value in values):
        return None
    first, shape = known[values[0]], shape_of(values[0])
    if shape is None or any(known[value] != first for value in values):
        return None
    place = _argument(node, 1, "dim", 0) % (len(shape) + 1)
    return Rule(first.at(first.dim + (place <= first.dim)))


def _unbound(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = _only(node, 0, known)
    if given is None:
        return None
    divided, shape = given
    place = _argument(node, 1, "dim", 0) % len(shape)
    return None if place == divided.dim else Rule(divided.at(divided.dim - (place < divided.dim)))


def _repeated(node: fx.Node, known: Known, _: int) -> Rule | None:
    given, dim = _only(node, 0, known), _argument(node, 2, "dim")
    if given is None or not isinstance(dim, int) or dim % len(given[1]) == given[0].dim:
        return None
    return Rule(given[0])


def _moved_along(node: fx.Node, known: Known, _: int) -> Rule | None:
    """Moves what lies along some dimensions."""
    given = _only(node, 0, known)
    dims: Any = node.args[-1]
    if given is None or not isinstance(dims, list | tuple) or not dims:
        return None
    along = {dim % len(given[1]) for dim in dims}
    return None if given[0].dim in along else Rule(given[0])


def _halved(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = _only(node, 0, known)
    if given is None or _argument(node, 1, "dim", -1) % len(given[1]) == given[0].dim:
        return None
    return Rule(given[0])


def _turned(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = _only(node, 0, known)
    return None if given is None else Rule(given[0].at(len(given[1]) - 1 - given[0].dim))


def _alike(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = _only(node, 0, known)
    return None if given is None else Rule(given[0])


_OWN: dict[str, Find] = {
    "linear": _linear,
    "embedding": _looked_up,
    **dict.fromkeys(
        ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), _normed
    ),
    **dict.fromkeys(("matmul", "mm", "bmm"), _multiplied),
    "addmm": _added_product,
    **dict.fromkeys(
        (
            "mean", "sum", "amax", "amin", "max", "min", "var", "std", "prod", "logsumexp", "any",
            "all", "argmax", "argmin", "linalg_vector_norm", "norm",
        ),
        _reduced,
    ),
    **dict.fromkeys(("cumsum", "cumprod"), RULES["softmax"]),
    "slice": _sliced,
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), _viewed),
    "stack": _stacked,
    "unbind": _unbound,
    "repeat_interleave": _repeated,
    **dict.fromkeys(("flip", "roll"), _moved_along),
    "glu": _halved,
    "t": _turned,
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "lift_fresh_copy"), _alike),
}  # fmt: skip
"""Beside ``RULES``, by the names of operations without ``aten::``."""
