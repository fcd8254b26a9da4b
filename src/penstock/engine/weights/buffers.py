"""Buffers: aligned memory into which stages come, used again and again, in groups of tensors.

Memory that is mapped anew costs a fault for each page when it is first touched; in the steady state
of training no buffer is new. What is free counts towards the budget, too, since the system does not
have it back; free buffers of other sizes go when room is needed.

On an accelerator a buffer is given back while streams still work on it, and taken again at once: it
remembers what is to happen before anybody writes to it.
"""

from __future__ import annotations

import mmap
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError, RunError
from penstock.base.units import format_bytes
from penstock.core.schedule.residence import whole_pages
from penstock.core.timing.spans import ALL_OF_STAGE
from penstock.engine.device.accelerators import HOST, is_on_host
from penstock.engine.device.crossing import give_memory
from penstock.engine.device.queue import moments_of_caller, taken_up
from penstock.engine.model import tree
from penstock.engine.weights.movers import Moved
from penstock.engine.weights.tiers import Extent


class MemoryBuffer:
    """A piece of memory of whole pages.

    Args:
        num_bytes: at least one page.
        device: where it is.

    Attributes:
        num_bytes: its size.
        taken_bytes: of these, what it was taken for.
        view: the memory, for reading and writing; empty on an accelerator.
        bytes: the same as a tensor.
        free_after: moments on an accelerator before which nobody may write to it.
    """

    def __init__(self, num_bytes: int, device: torch.device = HOST) -> None:
        self.num_bytes = self.taken_bytes = num_bytes
        self.free_after: list[torch.Event] = []
        if is_on_host(device):
            memory = mmap.mmap(-1, num_bytes)
            self.view = memoryview(memory)
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            self.view = memoryview(b"")
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            # The allocator gives memory that its own stream is not done with.
            self.free_after += moments_of_caller([device]).values()
        self._alone = self._num_holders()

    def claim(self) -> None:
        """Before this thread's current stream writes to it: let that come behind all that others
        still do here."""
        for moment in self.free_after:
            taken_up([self.bytes], moment)
        self.free_after.clear()

    def tensor(
        self, offset: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]
    ) -> Tensor:
        """The tensor that lies at an offset, which is one of its type's alignment."""
        end = self.num_bytes - (self.num_bytes - offset) % dtype.itemsize
        # Without ``.data`` it would keep this memory alive, also once it has values elsewhere.
        return self.bytes[offset:end].view(dtype).as_strided(size, stride).data

    @property
    def start(self) -> int:
        """The address of its first byte."""
        return self.bytes.data_ptr()

    @property
    def is_held(self) -> bool:
        """Whether any tensor but its own still sees this memory."""
        return self._num_holders() > self._alone

    def _num_holders(self) -> int:
        storage = self.bytes.untyped_storage()
        count: int = torch._C._storage_Use_Count(storage._cdata)
        return count


class SpareBuffers:
    """Free buffers that ranks which take turns hand on to each other; any thread may ask.

    Args:
        limit_bytes: the most that it keeps.
    """

    def __init__(self, limit_bytes: float) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[MemoryBuffer]] = defaultdict(list)
        self._kept = 0

    def take(self, size: int) -> MemoryBuffer | None:
        """A buffer of exactly this size, if there is one."""
        with self._lock:
            if not self._free[size]:
                return None
            self._kept -= size
            return self._free[size].pop()

    def put(self, buffer: MemoryBuffer) -> None:
        """Take a buffer that nobody uses; what is beyond the limit goes back to the system."""
        with self._lock:
            if self._kept + buffer.num_bytes <= self._limit_bytes:
                self._kept += buffer.num_bytes
                self._free[buffer.num_bytes].append(buffer)


_HARDLY_LARGER = 1.125


class BufferPool:
    """The buffers of one rank, within a budget.

    Args:
        budget_bytes: the most that all of them together may have, free ones included.
        device: where they are.

    Attributes:
        budget_bytes, device: as given.
        slack_bytes: what free ones may have beyond the budget, and what others may be larger than
            they need be.
        peak_bytes: the most that they have had.
        used_peak_bytes: the most that has been in use at once.
        spare: where free buffers may come from and go to, if other ranks have some.
        reclaim: waits for what is on its way out of buffers, and gives these back.
    """

    def __init__(self, budget_bytes: float, device: torch.device = HOST) -> None:
        self.budget_bytes = budget_bytes
        self.slack_bytes = 0.0
        self.device = device
        self._free: dict[int, list[MemoryBuffer]] = defaultdict(list)
        self._mapped = self._used = self._unused = 0
        self.peak_bytes = self.used_peak_bytes = 0
        self.spare: SpareBuffers | None = None
        self.reclaim: Callable[[], None] | None = None

    def take(self, num_bytes: int, whose: str) -> MemoryBuffer:
        """A buffer for so many bytes; what is in it is anything.

        Raises:
            RunError: the budget has no room for it.
        """
        size = max(whole_pages(num_bytes), whole_pages(1))
        self._wait_for_room(size)
        buffer = self._free[size].pop() if self._free[size] else self._like(size)
        if buffer is None:
            self._make_room(size, whose)
            spare = None if self.spare is None else self.spare.take(size)
            buffer = spare or MemoryBuffer(size, self.device)
            self._mapped += size
        buffer.taken_bytes = size
        self._unused += buffer.num_bytes - size
        self._use(size)
        return buffer

    def _use(self, num_bytes: int) -> None:
        self._used += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._mapped)
        self.used_peak_bytes = max(self.used_peak_bytes, self._used)

    def _like(self, size: int) -> MemoryBuffer | None:
        """A free buffer that is hardly larger, if there is slack for that: stages with other layers
        beside the same blocks differ by little, and what is mapped anew costs a fault for each
        page."""
        most = min(size * _HARDLY_LARGER, size + self.slack_bytes - self._unused)
        fitting = [other for other, free in self._free.items() if free and size < other <= most]
        if not fitting or not is_on_host(self.device):
            return None
        return self._free[min(fitting)].pop()

    def _wait_for_room(self, size: int) -> None:
        """A leaving group keeps its buffer until it is written, unless the room is needed sooner:
        gradients that no update has used are written and come back within one visit, where a
        rank keeps its only stage."""
        if self._used + size > self.budget_bytes and self.reclaim is not None:
            self.reclaim()

    def _make_room(self, size: int, whose: str) -> None:
        most = self.budget_bytes + self.slack_bytes
        while (lacking := self._mapped + size - most) > 0:
            free = [other for other, buffers in self._free.items() if buffers]
            if not free:
                break
            other = min((other for other in free if other >= lacking), default=max(free))
            self._free[other].pop()
            self._mapped -= other
        if self._used + size > self.budget_bytes:
            raise RunError(
                f"no room for {format_bytes(size)} of {whose}: of the "
                f"{format_bytes(self.budget_bytes)} for stages that come and go, "
                f"{format_bytes(self._used)} are in use; plan with more memory_bytes"
            )

    def count(self, num_bytes: int, whose: str = "") -> None:
        """Let memory that is no buffer count as used, or, if negative, as free again.

        Raises:
            RunError: the budget has no room for it.
        """
        if num_bytes > 0:
            self._wait_for_room(num_bytes)
            self._make_room(num_bytes, whose)
        self._mapped += num_bytes
        self._use(num_bytes)

    def give(self, buffer: MemoryBuffer) -> None:
        """Take a buffer back."""
        self._release(buffer)
        self._free[buffer.num_bytes].append(buffer)

    def drop(self, buffer: MemoryBuffer) -> None:
        """Let a buffer go for good: somebody may still see it, so it must not be used again."""
        self._release(buffer)
        self._mapped -= buffer.num_bytes

    def _release(self, buffer: MemoryBuffer) -> None:
        self._used -= buffer.taken_bytes
        self._unused -= buffer.num_bytes - buffer.taken_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes that all of them have now, free ones included, and what else is counted."""
        return self._mapped

    def lend(self) -> None:
        """Hand all free buffers on to whoever needs them; this rank stands still for a while."""
        if self.spare is None:
            return
        for free in self._free.values():
            for buffer in free:
                self._mapped -= buffer.num_bytes
                self.spare.put(buffer)
            free.clear()

    def clear(self) -> None:
        """Give all free memory back to the system."""
        self._mapped -= sum(size * len(free) for size, free in self._free.items())
        self._free.clear()


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
