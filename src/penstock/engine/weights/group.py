"""Tensors that travel together: between a buffer of memory and an extent of a tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError, RunError
from penstock.core.timing.spans import ALL_OF_STAGE
from penstock.engine.device.crossing import give_memory
from penstock.engine.model import tree
from penstock.engine.weights.buffers import MemoryBuffer
from penstock.engine.weights.movers import Moved
from penstock.engine.weights.tiers import Extent, whole_pages

_ALIGNED = 64


class TensorPlace(NamedTuple):
    """Where a tensor lies in its group."""

    tensor: Tensor
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class SwapGroup:
    """Tensors of one stage that come and go together. They stay the objects that they are; what
    changes is where their values lie.

    Args:
        whose: what they are, for errors.
        tensors: those that hold their values densely keep their strides.
        stage: whose they are.
        microbatch: where they are what it keeps.

    Attributes:
        whose, stage, microbatch: as given.
        num_bytes: of the extent and of the buffer that they need; 0 without tensors.
        extent: where they lie in the tier, once that is reserved.
        buffer: where they lie in memory, if they are there or on their way.
        arriving: ends when what is on its way has come.
        writing: ends when the tier has what was written last.
        is_parked: whether the buffer has the values, and the tensors do not look there.
    """

    def __init__(
        self, whose: str, tensors: Sequence[Tensor], stage: int, microbatch: int = ALL_OF_STAGE
    ) -> None:
        self.whose = whose
        self.stage = stage
        self.microbatch = microbatch
        self.places: list[TensorPlace] = []
        end = 0
        for tensor in tensors:
            stride = torch.empty_like(tensor, device="meta").stride()
            self.places.append(TensorPlace(tensor, end, tensor.size(), stride))
            end += -(-tensor.numel() * tensor.itemsize // _ALIGNED) * _ALIGNED
        self.num_bytes = whole_pages(end)
        self.extent: Extent | None = None
        self.buffer: MemoryBuffer | None = None
        self.arriving: Moved | None = None
        self.writing: Moved | None = None
        self.is_parked = False
        self._versions = 0

    @property
    def has_parameters(self) -> bool:
        """Whether it is made of weights, and not of gradients or state."""
        return bool(self.places) and isinstance(self.places[0].tensor, nn.Parameter)

    @property
    def is_trained(self) -> bool:
        """Whether an update changes its values: what is frozen has none."""
        return not self.has_parameters or any(place.tensor.requires_grad for place in self.places)

    @property
    def has_changed(self) -> bool:
        """Whether anybody has written to a tensor since it was pointed to its values."""
        return self._versions != self._counted_versions()

    def _counted_versions(self) -> int:
        return sum(place.tensor._version for place in self.places)

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in order."""
        return [place.tensor for place in self.places]

    def lies_in(self, buffer: MemoryBuffer, place: TensorPlace) -> Tensor:
        """The part of a buffer that has one of the tensors."""
        return buffer.tensor(place.offset, place.tensor.dtype, place.size, place.stride)

    def move_in(self, buffer: MemoryBuffer) -> None:
        """Copy all values into a buffer, in which they are from now on; memory that they leave is
        free at once, tensor by tensor."""
        self.buffer = buffer
        buffer.claim()
        for place in self.places:
            inside = self.lies_in(buffer, place)
            inside.copy_(place.tensor.detach())
            give_memory(place.tensor, inside)

    def point(self) -> None:
        """Let the tensors have the values that their buffer has."""
        assert self.buffer is not None
        for place in self.places:
            place.tensor.data = self.lies_in(self.buffer, place)
        self.is_parked = False
        self._versions = self._counted_versions()

    def blank(self, device: torch.device | None = None) -> None:
        """Take the values away: shape and type stay, and whoever reads them sees NaN.

        Args:
            device: where the tensors are from now on; by default where they were.
        """
        for place in self.places:
            give_memory(place.tensor, nothing_like(place.tensor, device))

    def drop(self) -> None:
        """Take the values away from tensors that nobody but this group looks at."""
        for place in self.places:
            place.tensor.data = place.tensor.new_empty(0)

    def is_in(self, buffer: MemoryBuffer) -> bool:
        """Whether the values of all tensors are where this group has put them."""
        return all(
            place.tensor.data_ptr() == buffer.start + place.offset or not place.tensor.numel()
            for place in self.places
        )


def nothing_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor of this shape and type that takes no memory and has no values."""
    fills = tensor.is_floating_point() or tensor.is_complex()
    where = device or tensor.device
    filled = torch.full((), torch.nan if fills else 0, dtype=tensor.dtype, device=where)
    return filled.expand(tensor.shape)


class WeightPlaceholder:
    """Stands for a part of a group that a backward will read where the group lies then."""

    __slots__ = ("_dtype", "_group", "_offset", "_size", "_stride")

    def __init__(self, group: SwapGroup, buffer: MemoryBuffer, tensor: Tensor) -> None:
        self._group = group
        self._offset = tensor.data_ptr() - buffer.start
        self._dtype = tensor.dtype
        self._size = tensor.size()
        self._stride = tensor.stride()

    def unpack(self) -> Tensor:
        """The same part of the same tensors, now."""
        buffer = self._group.buffer
        if buffer is None or self._group.arriving is not None:
            raise RunError(
                f"a backward reads the {self._group.whose}, which are not in memory; this is a "
                "mistake of Penstock's: report it with the schedule"
            )
        return buffer.tensor(self._offset, self._dtype, self._size, self._stride)


def _hides_tensors(value: object) -> bool:
    return isinstance(value, list | tuple | dict) and bool(tree.tensors(value))


def state_tensors(
    optimizer: torch.optim.Optimizer | None, parameters: Sequence[nn.Parameter]
) -> list[Tensor]:
    """Tensors that an optimizer keeps of parameters; single numbers are not worth a transfer."""
    if optimizer is None:
        return []
    for key, kept in optimizer.state.items():
        if not isinstance(key, nn.Parameter) or any(map(_hides_tensors, kept.values())):
            raise InputError(
                f"{type(optimizer).__name__} keeps tensors that belong to no parameter of its "
                "stage, or several in a list, and these cannot come and go with it; take another "
                'optimizer, or plan with spill="never"'
            )
    own = {id(parameter) for parameter in parameters}
    return [
        value
        for parameter, state in optimizer.state.items()
        if id(parameter) in own
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() and value.layout is torch.strided
    ]
