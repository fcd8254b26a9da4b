"""Rules of recorded operations for a dimension that is sharded over members.

A rule gets the operation, and how what it is given is divided (``ShardedDim``). It says how the
output is divided and, where the operation has sizes as constants, with which arguments a member
calls it; ``None`` if the operation must be given whole values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from sys import maxsize
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx


class ShardedDim(NamedTuple):
    """A dimension of ``outer × length × inner`` numbers, of which members have some of the
    ``length``. Queries, keys and values of one linear layer are an ``outer`` of three; a feature of
    a head that was repeated is an ``inner``.

    Attributes:
        dim: the dimension, from 0.
        length: what is divided.
        inner: numbers that stay together.
        parts: how many of the ``length`` each member has.
    """

    dim: int
    length: int
    inner: int
    parts: tuple[int, ...]

    def outer(self, size: int) -> int:
        """How many times the divided numbers lie one behind another in a whole dimension."""
        return size // (self.length * self.inner)

    def local(self, size: int, member: int) -> int:
        """The numbers that a member has of a whole dimension of ``size``."""
        return size // self.length * self.parts[member]

    def at(self, dim: int) -> ShardedDim:
        """The same in another place."""
        return self._replace(dim=dim)

    def alike(self, other: ShardedDim) -> bool:
        """Whether members have the same numbers of a dimension of the same size."""
        mine, theirs = (
            (sharded.length * sharded.inner, *(part * sharded.inner for part in sharded.parts))
            for sharded in (self, other)
        )
        return mine == theirs


def reshaped(divided: ShardedDim, before: Sequence[int], after: Sequence[int]) -> ShardedDim | None:
    """The sharded dimension of a value that is seen in another shape.

    Args:
        before, after: its whole shapes.

    Returns:
        ``None`` if no dimension of the new shape is divided in one piece.

    >>> reshaped(ShardedDim(2, 12, 1, (6, 6)), (5, 7, 12), (5, 7, 4, 3))
    ShardedDim(dim=2, length=4, inner=1, parts=(2, 2))
    >>> reshaped(ShardedDim(1, 4, 1, (2, 2)), (5, 4, 7), (20, 7))
    ShardedDim(dim=0, length=4, inner=1, parts=(2, 2))
    >>> reshaped(ShardedDim(2, 12, 1, (6, 6)), (5, 7, 12), (5, 7, 3, 4)) is None
    True
    """
    # From how many numbers on one step in the divided places goes, and where they begin again.
    step = divided.inner * prod(before[divided.dim + 1 :])
    end = step * divided.length
    for dim, size in enumerate(after):
        below = prod(after[dim + 1 :])
        if not below < end <= below * size:
            continue
        if below <= step:
            if step % below or (below * size) % end:
                return None
            return divided._replace(dim=dim, inner=step // below)
        # What is divided is cut in two, of which the outer one is divided still.
        steps = below // step
        if below % step or divided.length % steps or any(part % steps for part in divided.parts):
            return None
        if (below * size) % end:
            return None
        parts = tuple(part // steps for part in divided.parts)
        return ShardedDim(dim, divided.length // steps, 1, parts)
    return None


class Rule(NamedTuple):
    """An operation as a member performs it.

    Attributes:
        divided: how the output is.
        arguments: to be given instead; ``None`` for the same.
        cut: whole values of which a member takes the part that goes with the output's.
    """

    divided: ShardedDim | None
    arguments: tuple[Any, ...] | None = None
    cut: tuple[fx.Node, ...] = ()


Known = Mapping[fx.Node, ShardedDim]
Find = Callable[[fx.Node, Known, int], Rule | None]


def shape_of(node: fx.Node) -> list[int] | None:
    """The whole shape that a value had when it was recorded; ``None`` if it is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or None in _hints(value):
        return None  # nobody knows how long it is that depends on values
    return sizes_of(value)


def sizes_of(value: Tensor) -> list[int]:
    """The sizes that a value had when it was recorded, also of dimensions that may vary."""
    return [int(hint) for hint in _hints(value)]


def _hints(value: Tensor) -> list[Any]:
    sizes: list[Any] = [*value.shape]
    return [getattr(size, "node", _Plain(size)).hint for size in sizes]


class _Plain(NamedTuple):
    """A size that is a number, as symbolic ones show what they were."""

    hint: int


def _first(node: fx.Node, known: Known) -> tuple[ShardedDim, list[int]] | None:
    """How an operation's first argument is divided, and its shape; ``None`` unless it is, alone."""
    value = node.args[0]
    others = [other for other in node.all_input_nodes if other is not value]
    if (
        not isinstance(value, fx.Node)
        or value not in known
        or any(other in known for other in others)
    ):
        return None
    shape = shape_of(value)
    return None if shape is None else (known[value], shape)


def _same(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = _first(node, known)
    return None if given is None else Rule(given[0])


def _pointwise(node: fx.Node, known: Known, _: int) -> Rule | None:
    """All that is divided must be so alike; what is whole is cut alike, or is one number there."""
    output = shape_of(node)
    if output is None or torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return None
    agreed: ShardedDim | None = None
    for value in node.all_input_nodes:
        if value in known:
            shape = shape_of(value)
            if shape is None:
                return None
            own = known[value].at(known[value].dim + len(output) - len(shape))
            if agreed is not None and not (own.dim == agreed.dim and own.alike(agreed)):
                return None
            agreed = own
    if agreed is None:
        return None
    others = [value for value in node.all_input_nodes if value not in known]
    cut = _to_cut(others, agreed.dim - len(output), output)
    return None if cut is None else Rule(agreed, cut=cut)


def _to_cut(
    whole: Sequence[fx.Node], place: int, output: Sequence[int]
) -> tuple[fx.Node, ...] | None:
    """The whole values that go all along a dimension of the output, counted from its last; ``None``
    if one goes along some of it."""
    sizes = {value: _size_at(value, place) for value in whole}
    if any(size not in (None, 1, output[place]) for size in sizes.values()):
        return None
    return tuple(value for value, size in sizes.items() if size == output[place] != 1)


def _size_at(value: fx.Node, place: int) -> int | None:
    """A tensor's size in a dimension counted from its last; ``None`` without such a dimension."""
    shape = shape_of(value)
    return None if shape is None or len(shape) < -place else shape[place]


def _with_size(
    node: fx.Node, argument: int, place: int, divided: ShardedDim, whole: int, member: int
) -> tuple[Any, ...] | None:
    """Arguments with a member's size in the place of the whole one; ``None`` if it is computed."""
    sizes = list(node.args[argument])  # type: ignore[arg-type]
    if not isinstance(sizes[place], int):
        return None
    if sizes[place] != -1:
        sizes[place] = divided.local(whole, member)
    return (*node.args[:argument], sizes, *node.args[argument + 1 :])


def _viewed(node: fx.Node, known: Known, member: int) -> Rule | None:
    given, output = _first(node, known), shape_of(node)
    if given is None or output is None:
        return None
    divided = reshaped(*given, output)
    if divided is None:
        return None
    if _bare(node) == "flatten":
        return Rule(divided)
    argument, skipped = 1, 0
    if _bare(node) == "unflatten":
        argument, skipped = 2, int(node.args[1]) % len(given[1])  # type: ignore[arg-type]
    if not 0 <= divided.dim - skipped < len(node.args[argument]):  # type: ignore[arg-type]
        return Rule(divided)
    whole = output[divided.dim]
    arguments = _with_size(node, argument, divided.dim - skipped, divided, whole, member)
    return None if arguments is None else Rule(divided, arguments)


def _expanded(node: fx.Node, known: Known, member: int) -> Rule | None:
    given, output = _first(node, known), shape_of(node)
    if given is None or output is None:
        return None
    divided, shape = given
    divided = divided.at(divided.dim + len(output) - len(shape))
    arguments = _with_size(node, 1, divided.dim, divided, output[divided.dim], member)
    return None if arguments is None else Rule(divided, arguments)


def _permuted(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = _first(node, known)
    if given is None:
        return None
    divided, shape = given
    order = [int(dim) % len(shape) for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    return Rule(divided.at(order.index(divided.dim)))


def _transposed(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = _first(node, known)
    if given is None:
        return None
    divided, shape = given
    dims = node.args[1:3] if len(node.args) > 1 else (0, 1)
    first, second = (int(dim) % len(shape) for dim in dims)  # type: ignore[arg-type]
    swapped = {first: second, second: first}
    return Rule(divided.at(swapped.get(divided.dim, divided.dim)))


def _unsqueezed(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = _first(node, known)
    if given is None:
        return None
    divided, shape = given
    place = int(node.args[1]) % (len(shape) + 1)  # type: ignore[arg-type]
    return Rule(divided.at(divided.dim + (place <= divided.dim)))


def _one_of(node: fx.Node, known: Known, _: int) -> Rule | None:
    """``squeeze`` and ``select`` of another dimension than the one that is divided."""
    given = _first(node, known)
    if given is None or not isinstance(node.args[1], int):
        return None
    divided, shape = given
    place = node.args[1] % len(shape)
    if place == divided.dim:
        return None
    gone = _bare(node) == "select" or shape[place] == 1
    return Rule(divided.at(divided.dim - (gone and place < divided.dim)))


def _elsewhere(node: fx.Node, known: Known, _: int) -> Rule | None:
    """Works along one dimension, which is the second argument, and must not be divided."""
    given = _first(node, known)
    if given is None:
        return None
    divided, shape = given
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(dim, int) or dim % len(shape) == divided.dim:
        return None
    return Rule(divided)


def _sliced(node: fx.Node, known: Known, member: int) -> Rule | None:
    """Along another dimension, or all of the one that is divided, as ``value[:, :]`` takes it."""
    start, end, step = [*node.args[2:], None, None, None][:3]
    given = _first(node, known)
    if given is None:
        return None
    divided, shape = given
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    is_all = not start and step in (None, 1) and (end is None or _reaches(end, shape[divided.dim]))
    if is_all and isinstance(dim, int) and dim % len(shape) == divided.dim:
        return Rule(divided, (node.args[0], dim, 0, maxsize))
    return _elsewhere(node, known, member)


def _reaches(end: Any, size: int) -> bool:
    return isinstance(end, int) and end >= size


def _normed(node: fx.Node, known: Known, _: int) -> Rule | None:
    """Over the last dimensions, of which none is divided."""
    given = _first(node, known)
    if given is None:
        return None
    divided, shape = given
    last = len(node.args[1])  # type: ignore[arg-type]
    return Rule(divided) if divided.dim < len(shape) - last else None


def _asked_size(node: fx.Node, known: Known, _: int) -> Rule | None:
    """How long a dimension is that is not divided."""
    given = _first(node, known)
    if given is None or not isinstance(node.args[1], int):
        return None
    divided, shape = given
    return None if node.args[1] % len(shape) == divided.dim else Rule(None)


def _averaged(node: fx.Node, known: Known, _: int) -> Rule | None:
    """Over dimensions that stay, and are not divided."""
    given = _first(node, known)
    if given is None or len(node.args) < 3 or not node.args[2]:
        return None
    divided, shape = given
    dims = node.args[1]
    numbers = dims if isinstance(dims, Sequence) else [None]
    averages_it = any(
        not isinstance(dim, int) or dim % len(shape) == divided.dim for dim in numbers
    )
    return None if averages_it else Rule(divided)


def _split(node: fx.Node, known: Known, member: int) -> Rule | None:
    """Into the pieces of which members have a part each, or along another dimension."""
    given = _first(node, known)
    if given is None:
        return None
    divided, shape = given
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if not isinstance(dim, int):
        return None
    size, piece = shape[divided.dim], divided.length * divided.inner
    own, count = divided.local(piece, member), divided.outer(size)
    if dim % len(shape) != divided.dim or (_bare(node) == "chunk" and node.args[1] == count):
        return Rule(divided)
    ours = {"split": own, "split_with_sizes": [own] * count}.get(_bare(node))
    if ours is None or node.args[1] not in (piece, [piece] * count):
        return None
    return Rule(divided, (node.args[0], ours, *node.args[2:]))


def _item(node: fx.Node, known: Known, _: int) -> Rule | None:
    value = node.args[0]
    return Rule(known[value]) if isinstance(value, fx.Node) and value in known else None


def _concatenated(node: fx.Node, known: Known, _: int) -> Rule | None:
    values: Sequence[Any] = node.args[0]  # type: ignore[assignment]
    output = shape_of(node)
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if output is None or not isinstance(dim, int) or any(value not in known for value in values):
        return None
    first = known[values[0]]
    fit = all(known[value].dim == first.dim and known[value].alike(first) for value in values)
    return Rule(first) if fit and dim % len(output) != first.dim else None


def _multiplied(node: fx.Node, known: Known, _: int) -> Rule | None:
    """Products of matrices, of which members have some; attention, of which they have heads."""
    attends = _bare(node) == "scaled_dot_product_attention"
    matrices, output = node.args[: 3 if attends else 2], shape_of(node)
    if attends and (node.kwargs.get("dropout_p") or any(node.args[4:5])):
        return None  # the mask would be that of other heads
    if output is None or not all(
        isinstance(matrix, fx.Node) and matrix in known for matrix in matrices
    ):
        return None
    divided = [known[matrix] for matrix in matrices]  # type: ignore[index]
    shapes = [shape_of(matrix) for matrix in matrices]  # type: ignore[arg-type]
    first, place = divided[0], divided[0].dim - len(output)
    # Keys may have fewer heads than queries; then each of theirs is for several in a row.
    grouped = bool(node.kwargs.get("enable_gqa"))
    fit = place < -2 and all(own.dim == first.dim for own in divided)
    fit = fit and all(shape is not None and len(shape) == len(output) for shape in shapes)
    if not fit or not (grouped or all(own.alike(first) for own in divided)):
        return None
    if grouped and not _in_proportion(divided, [shape[first.dim] for shape in shapes if shape]):
        return None
    others = [other for other in node.all_input_nodes if other not in matrices]
    if any(other in known for other in others):
        return None
    cut = _to_cut(others, place, output)
    return None if cut is None else Rule(first, cut=cut)


def _in_proportion(divided: Sequence[ShardedDim], sizes: Sequence[int]) -> bool:
    """Whether each member has the same share of all."""
    first, size = divided[0], sizes[0]
    return all(
        sharded.local(own, member) * size == first.local(size, member) * own
        for sharded, own in zip(divided, sizes, strict=True)
        for member in range(len(first.parts))
    )


def _bare(node: fx.Node) -> str:
    return str(node.target._schema.name).removeprefix("aten::")  # type: ignore[union-attr]


RULES: dict[str, Find] = {
    "pointwise": _pointwise,
    **dict.fromkeys(("contiguous", "clone", "to", "_to_copy", "detach", "alias"), _same),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _viewed),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax"), _elsewhere),
    "slice": _sliced,
    **dict.fromkeys(("layer_norm", "rms_norm"), _normed),
    "mean": _averaged,
    **dict.fromkeys(("select", "squeeze"), _one_of),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("matmul", "bmm", "scaled_dot_product_attention"), _multiplied),
    "expand": _expanded,
    "sym_size": _asked_size,
    "permute": _permuted,
    "transpose": _transposed,
    "unsqueeze": _unsqueezed,
    "getitem": _item,
    "cat": _concatenated,
}
"""By the names of operations, without ``aten::``."""
