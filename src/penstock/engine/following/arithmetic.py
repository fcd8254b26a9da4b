"""Rules of operations that compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from penstock.engine.following.dims import Known, ShardedDim, shape_of
from penstock.engine.following.moves import along
from penstock.engine.following.rule import Find, Rule, argument, name_of, only, to_cut


def pointwise(node: fx.Node, known: Known, _: int) -> Rule | None:
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
    cut = to_cut(others, agreed.dim - len(output), output)
    return None if cut is None else Rule(agreed, cut=cut)


def _linear(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = only(node, known)
    if given is None or given[0].dim == len(given[1]) - 1:
        return None
    return Rule(given[0])


def _looked_up(node: fx.Node, known: Known, _: int) -> Rule | None:
    given = only(node, known, 1)
    # Gradients that are scaled by how often a word occurs would need the words of all.
    counts = bool(argument(node, 3, "scale_grad_by_freq"))
    return None if given is None or counts else Rule(given[0])


def _normed(node: fx.Node, known: Known, _: int) -> Rule | None:
    """Over the last dimensions, of which none is divided."""
    given = only(node, known)
    if given is None:
        return None
    divided, shape = given
    over: Sequence[Any] = node.args[1]  # type: ignore[assignment]
    return Rule(divided) if divided.dim < len(shape) - len(over) else None


def _reduced(node: fx.Node, known: Known, _: int) -> Rule | None:
    """Over other dimensions than the one that is divided."""
    given, output = only(node, known), shape_of(node)
    dims = argument(node, 2 if "norm" in name_of(node) else 1, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    is_many = isinstance(dims, list | tuple) and all(isinstance(dim, int) for dim in dims)
    if given is None or output is None or not dims or not is_many:
        return None
    divided, shape = given
    gone = {dim % len(shape) for dim in dims}
    if divided.dim in gone:
        return None
    before = sum(dim < divided.dim for dim in gone) if len(output) < len(shape) else 0
    return Rule(divided.at(divided.dim - before))


def _added_product(node: fx.Node, known: Known, _: int) -> Rule | None:
    given, bias = only(node, known, 1), node.args[0]
    if given is None or not isinstance(bias, fx.Node) or len(shape_of(bias) or (0, 0)) != 1:
        return None
    return Rule(given[0]) if given[0].dim == 0 else None


def _multiplied(node: fx.Node, known: Known, member: int) -> Rule | None:
    """Rows times a whole matrix, a whole matrix times columns; or matrices that members have."""
    output = shape_of(node)
    for place, contracted in ((0, -1), (1, -2)):
        given = only(node, known, place)
        if given is None or output is None:
            continue
        divided, shape = given
        from_last = divided.dim - len(shape)
        is_row_or_column = from_last in (-1, -2) and from_last != contracted and len(shape) > 1
        other = node.args[1 - place]
        flat = isinstance(other, fx.Node) and len(shape_of(other) or ()) == 2
        if is_row_or_column or (place == 0 and flat and from_last != contracted):
            return Rule(divided.at(from_last + len(output)))
    return _by_matrices(node, known, member)


def _by_matrices(node: fx.Node, known: Known, _: int) -> Rule | None:
    """Products of matrices, of which members have some; attention, of which they have heads."""
    attends = name_of(node) == "scaled_dot_product_attention"
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
    cut = to_cut(others, place, output)
    return None if cut is None else Rule(first, cut=cut)


def _in_proportion(divided: Sequence[ShardedDim], sizes: Sequence[int]) -> bool:
    """Whether each member has the same share of all."""
    first, size = divided[0], sizes[0]
    return all(
        sharded.local(own, member) * size == first.local(size, member) * own
        for sharded, own in zip(divided, sizes, strict=True)
        for member in range(len(first.parts))
    )


ARITHMETIC: dict[str, Find] = {
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "cumsum", "cumprod"), along(1, 0)),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), _normed),
    **dict.fromkeys(
        (
            "mean", "sum", "amax", "amin", "max", "min", "var", "std", "prod", "logsumexp", "any",
            "all", "argmax", "argmin", "linalg_vector_norm", "norm",
        ),
        _reduced,
    ),
    **dict.fromkeys(("matmul", "mm", "bmm"), _multiplied),
    "scaled_dot_product_attention": _by_matrices,
    "linear": _linear,
    "addmm": _added_product,
    "embedding": _looked_up,
}  # fmt: skip
"""By the names of operations."""
