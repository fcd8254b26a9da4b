"""Rules of operations that move numbers, or see them in another shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from penstock.engine.following.dims import Known, ShardedDim, reshaped, shape_of
from penstock.engine.following.rule import Find, Rule, argument, name_of, only


def _same(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = only(node, known)
    return None if given is None else Rule(given[0])


def _with_size(
    node: fx.Node, place: int, dim: int, divided: ShardedDim, whole: int, member: int
) -> tuple[Any, ...] | None:
    """Arguments with a member's size in the place of the whole one.

    Args:
        place: of the argument that has the sizes.
        dim: whose size it is, among those.

    Returns:
        ``None`` where the size is computed for the whole, and torch cannot find it.
    """
    sizes: list[Any] = list(node.args[place])  # type: ignore[arg-type]
    if not isinstance(sizes[dim], int):
        if any(isinstance(size, int) and size == -1 for size in sizes):
            return None
        sizes[dim] = -1
    elif sizes[dim] != -1:
        sizes[dim] = divided.local(whole, member)
    return (*node.args[:place], sizes, *node.args[place + 1 :])


def _viewed(node: fx.Node, known: Known, member: int) -> Rule | None:
    given, output = only(node, known), shape_of(node)
    divided = None if given is None or output is None else reshaped(*given, output)
    if given is None or output is None or divided is None:
        return None
    if name_of(node) == "flatten":
        return Rule(divided)
    place, skipped = 1, 0
    if name_of(node) == "unflatten":
        place, skipped = 2, int(node.args[1]) % len(given[1])  # type: ignore[arg-type]
    if not 0 <= divided.dim - skipped < len(node.args[place]):  # type: ignore[arg-type]
        return Rule(divided)
    whole = output[divided.dim]
    arguments = _with_size(node, place, divided.dim - skipped, divided, whole, member)
    return None if arguments is None else Rule(divided, arguments)


def _expanded(node: fx.Node, known: Known, member: int) -> Rule | None:
    given, output = only(node, known), shape_of(node)
    if given is None or output is None:
        return None
    divided, shape = given
    divided = divided.at(divided.dim + len(output) - len(shape))
    arguments = _with_size(node, 1, divided.dim, divided, output[divided.dim], member)
    return None if arguments is None else Rule(divided, arguments)


def _permuted(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = only(node, known)
    if given is None:
        return None
    divided, shape = given
    order = [int(dim) % len(shape) for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    return Rule(divided.at(order.index(divided.dim)))


def _transposed(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = only(node, known)
    if given is None:
        return None
    divided, shape = given
    dims = node.args[1:3] if len(node.args) > 1 else (0, len(shape) - 1)
    first, second = (int(dim) % len(shape) for dim in dims)  # type: ignore[arg-type]
    swapped = {first: second, second: first}
    return Rule(divided.at(swapped.get(divided.dim, divided.dim)))


def _unsqueezed(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = only(node, known)
    if given is None:
        return None
    divided, shape = given
    place = int(node.args[1]) % (len(shape) + 1)  # type: ignore[arg-type]
    return Rule(divided.at(divided.dim + (place <= divided.dim)))


def _without(node: fx.Node, known: Known, _: int) -> Rule | None:
    """``squeeze``, ``select`` and ``unbind`` of another dimension than the one that is divided."""
    name = name_of(node)
    given, dim = only(node, known), argument(node, 1, "dim", None if name == "squeeze" else 0)
    if given is None or not isinstance(dim, int):
        return None
    divided, shape = given
    place = dim % len(shape)
    if place == divided.dim:
        return None
    gone = name != "squeeze" or shape[place] == 1
    return Rule(divided.at(divided.dim - (gone and place < divided.dim)))


def along(place: int, default: int | None = None) -> Find:
    """The rule of what works along one dimension, which must not be divided.

    Args:
        place: of the argument that names it.
        default: the dimension where there is none.
    """

    def find(node: fx.Node, known: Known, _: int) -> Rule | None:
        given, dim = only(node, known), argument(node, place, "dim", default)
        if given is None or not isinstance(dim, int) or dim % len(given[1]) == given[0].dim:
            return None
        return Rule(given[0])

    return find


def _sliced(node: fx.Node, known: Known, member: int) -> Rule | None:
    """Along another dimension, or all of the one that is divided, as ``value[:, :]`` takes it."""
    given, dim = only(node, known), argument(node, 1, "dim", 0)
    if given is None or not isinstance(dim, int):
        return None
    divided, shape = given
    start, end = argument(node, 2, "start"), argument(node, 3, "end")
    reaches = end is None or (isinstance(end, int) and end >= shape[divided.dim])
    takes_all = not start and reaches and argument(node, 4, "step", 1) == 1
    return Rule(divided) if takes_all or dim % len(shape) != divided.dim else None


def _split(node: fx.Node, known: Known, member: int) -> Rule | None:
    """Into the pieces of which members have a part each, or along another dimension."""
    given, dim = only(node, known), argument(node, 2, "dim", 0)
    if given is None or not isinstance(dim, int):
        return None
    divided, shape = given
    name, size, piece = name_of(node), shape[divided.dim], divided.length * divided.inner
    own, count = divided.local(piece, member), divided.outer(size)
    if dim % len(shape) != divided.dim or (name == "chunk" and node.args[1] == count):
        return Rule(divided)
    ours = {"split": own, "split_with_sizes": [own] * count}.get(name)
    if ours is None or node.args[1] not in (piece, [piece] * count):
        return None
    return Rule(divided, (node.args[0], ours, *node.args[2:]))


def _item(node: fx.Node, known: Known, _: int) -> Rule | None:
    value = node.args[0]
    return Rule(known[value]) if isinstance(value, fx.Node) and value in known else None


def _concatenated(node: fx.Node, known: Known, _: int) -> Rule | None:
    values: Sequence[Any] = node.args[0]  # type: ignore[assignment]
    output, dim = shape_of(node), argument(node, 1, "dim", 0)
    if output is None or not isinstance(dim, int) or any(value not in known for value in values):
        return None
    first = known[values[0]]
    fit = all(known[value].dim == first.dim and known[value].alike(first) for value in values)
    return Rule(first) if fit and dim % len(output) != first.dim else None


def _stacked(node: fx.Node, known: Known, _: int) -> Rule | None:
    values: Sequence[Any] = node.args[0]  # type: ignore[assignment]
    if any(value not in known for value in values):
        return None
    first, shape = known[values[0]], shape_of(values[0])
    if shape is None or any(known[value] != first for value in values):
        return None
    place = argument(node, 1, "dim", 0) % (len(shape) + 1)
    return Rule(first.at(first.dim + (place <= first.dim)))


def _moved_along(node: fx.Node, known: Known, _: int) -> Rule | None:
    """Moves what lies along some dimensions."""
    given = only(node, known)
    dims: Any = node.args[-1]
    if given is None or not isinstance(dims, list | tuple) or not dims:
        return None
    along = {dim % len(given[1]) for dim in dims}
    return None if given[0].dim in along else Rule(given[0])


def _asked_size(node: fx.Node, known: Known, _: int) -> Rule | None:
    """How long a dimension is that is not divided."""
    given = only(node, known)
    if given is None or not isinstance(node.args[1], int):
        return None
    divided, shape = given
    return None if node.args[1] % len(shape) == divided.dim else Rule(None)


MOVES: dict[str, Find] = {
    **dict.fromkeys(
        (
            "contiguous", "clone", "to", "_to_copy", "detach", "alias", "zeros_like", "ones_like",
            "full_like", "lift_fresh_copy",
        ),
        _same,
    ),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _viewed),
    **dict.fromkeys(("select", "squeeze", "unbind"), _without),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("transpose", "t"), _transposed),
    **dict.fromkeys(("flip", "roll"), _moved_along),
    "slice": _sliced,
    "glu": along(1, -1),
    "expand": _expanded,
    "sym_size": _asked_size,
    "permute": _permuted,
    "unsqueeze": _unsqueezed,
    "getitem": _item,
    "cat": _concatenated,
    "stack": _stacked,
    "repeat_interleave": along(2),
}  # fmt: skip
"""By the names of operations."""
