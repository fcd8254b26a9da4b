"""Tensors of which this process has some rows, and others the rest.

torch's own, ``DTensor``, has them where all rows are gathered to compute. ``PartialTensor`` stands
in a model for weights that nobody gathers: each process computes with its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.masters import gradient_dtype


def whole_norms(rows: Sequence[Tensor], add: Callable[[Tensor], None]) -> list[Tensor]:
    """The norms of the gradients of whole tensors, of each of which some rows are here; 0 where
    there is none.

    Args:
        add: makes each number the sum of those of all processes; all of them call this.
    """
    squares = [
        torch.zeros((), dtype=torch.float64)
        if own.grad is None
        else torch.linalg.vector_norm(own.grad).double().square()
        for own in rows
    ]
    total = torch.stack(squares)
    add(total)
    norms = total.sqrt().unbind()
    return [norm.to(gradient_dtype(own)) for norm, own in zip(norms, rows, strict=True)]


class LocalRows(NamedTuple):
    """The rows of a tensor that this process has.

    Attributes:
        start: the first one's number.
        values: in their own memory.
    """

    start: int
    values: Tensor


class PartialTensor(Tensor):
    """A tensor without values, of which some rows are here.

    Args:
        whole: has its shape and type.
        here: the rows.
    """

    here: LocalRows

    @staticmethod
    def __new__(cls: type[Self], whole: Tensor, here: LocalRows) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, whole.shape, dtype=whole.dtype, device=whole.device, requires_grad=False
        )
        made.here = here
        return made

    def __init__(self, whole: Tensor, here: LocalRows) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        rows = range(self.here.start, self.here.start + len(self.here.values))
        return f"PartialTensor(shape={tuple(self.shape)}, rows={rows})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> PartialTensor:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0], args[0].here)
        raise ModelError(
            f"{function} wants a whole weight of an expert, and other ranks have a part of it; "
            "compute with it inside the module of experts only, or take expert_ranks=1"
        )


def rows_of(value: object) -> LocalRows | None:
    """The rows that are here of a tensor, if others have the rest."""
    if type(value) in (Tensor, nn.Parameter) or not isinstance(value, Tensor):
        return None
    if isinstance(value, PartialTensor):
        return LocalRows(value.here.start, value.here.values.detach())
    # It takes two seconds to import, and few pipelines need it.
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return None
    # torch may have put an equal mesh of an earlier pipeline here, whose group has ended.
    size, coordinate = value.device_mesh.size(), value.device_mesh.get_coordinate()
    assert coordinate is not None
    (index,) = coordinate
    start = min(index * -(-value.shape[0] // size), value.shape[0])
    values: Tensor = value.to_local()
    return LocalRows(start, values.detach())
