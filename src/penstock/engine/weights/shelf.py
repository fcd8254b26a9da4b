"""Tensors that are read from a tier while training goes on, without coming into memory.

A checkpoint of stages that come and go is taken from the tier on which they lie anyway. What lies
there is to stay as it is until it is read, although updates go on, so its extents are *held*: a
group whose extent is held writes to another one. That costs room on the tier, and no memory but a
buffer of a mebibyte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from penstock.engine.weights.group import Group
from penstock.engine.weights.lane import Moved
from penstock.engine.weights.slabs import Slab
from penstock.engine.weights.tiers import PAGE, Extent
from penstock.engine.weights.ways import Way

_BUFFER = 1 << 20


@dataclass(frozen=True)
class Shelved:
    """A tensor as it lies on a tier. What it lies in must be held until it is read.

    Attributes:
        way: to the tier.
        extent: where it lies, with others.
        written: the last write of the extent.
        offset: where its first element is in the extent.
        dtype, shape, strides: as of the tensor.
    """

    way: Way
    extent: Extent
    written: Moved | None
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in the order of its indices."""
        return torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous()

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes in the order in which they lie there; each piece is valid until the next.

        Raises:
            FileError: it could not be written or read, or is not what was written.
        """
        buffer = Slab(_BUFFER)
        start, stop = self.offset, self.offset + self.nbytes
        while start < stop:
            page = start // PAGE * PAGE
            length = min(_BUFFER, self.extent.num_bytes - page)
            self.way.peek(self.extent, page, buffer.view[:length], self.written)
            end = min(stop, page + length)
            yield buffer.view[start - page : end - page]
            start = end

    def tensor(self) -> Tensor:
        """All of it, in main memory, dense and in the order of its indices."""
        whole = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        size = self.nbytes // self.dtype.itemsize
        memory = whole.as_strided((size,), (1,)).view(torch.uint8).numpy().data
        done = 0
        for piece in self.pieces():
            memory[done : done + len(piece)] = piece
            done += len(piece)
        return whole.contiguous()


def shelved(way: Way, groups: Iterable[Group], tensors: Mapping[str, Tensor]) -> dict[str, Shelved]:
    """Of some tensors, those that lie in groups that are in memory, as they lie on the tier; their
    extents are held from now on.

    Args:
        way: to the tier.
        tensors: by name, with the memory of the groups or of anybody else.
    """
    by_address = {group.slab.start: group for group in groups if group.slab is not None}
    found = {}
    for name, tensor in tensors.items():
        group = by_address.get(tensor.untyped_storage().data_ptr())
        if group is None or group.extent is None or group.slab is None:
            continue
        group.extent.is_held = True
        offset = tensor.data_ptr() - group.slab.start
        found[name] = Shelved(
            way,
            group.extent,
            group.writing,
            offset,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
    return found
