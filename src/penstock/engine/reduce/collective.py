"""``AllReducer``: sums by ``torch.distributed``, in buckets: the library's own order of adding."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import DeadlineError, PeerError
from penstock.core.summation.filling import Filled
from penstock.engine.reduce.flat import FlatBuffers, FlatLayout, FlatReducer, Placed
from penstock.engine.reduce.reducer import SharedWeights
from penstock.engine.transport import Transport, groups

_BUCKET_BYTES = 4 * 2**20


class _Bucket(NamedTuple):
    """What is summed at once: numbers ``start`` to ``stop`` of the buffer of a type."""

    dtype: int
    start: int
    stop: int


class AllReducer(FlatReducer):
    """Sums by all-reduce, for one group of shared weights.

    Every holder gets the same bits; which they are depends on the library and the number of ranks.

    Args:
        rank: the holder.
        transport: the holder's end of its channels.
        group: of the holders of each group of weights, by its tag.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedWeights,
        transport: Transport,
        group: Sequence[dist.ProcessGroup],
    ) -> None:
        super().__init__(rank, shared, transport)
        self._group: dist.ProcessGroup | None = group[shared.tag]
        groups.lend(group[shared.tag], self)
        self._buffers: tuple[FlatLayout, FlatBuffers] | None = None
        self._filled: dict[int, Filled] = {}
        self._to_begin: deque[_Bucket] = deque()
        self._under_way: list[dist.Work] = []
        self.closed = False

    def release(self) -> None:
        """Let go of the group, which has been destroyed."""
        self._group = None

    def start(self, layout: FlatLayout) -> None:
        if self._buffers is None or self._buffers[0] is not layout:
            self._buffers = layout, FlatBuffers(layout)
        _, buffers = self._buffers
        self._filled = {dtype: Filled() for dtype in buffers.tensors}
        self._to_begin = deque(
            _Bucket(dtype, start, min(start + _BUCKET_BYTES // tensor.element_size(), len(tensor)))
            for dtype, tensor in buffers.tensors.items()
            for start in range(0, len(tensor), _BUCKET_BYTES // tensor.element_size())
        )

    def give(self, placed: Placed) -> bool:
        assert self._buffers is not None
        _, buffers = self._buffers
        there = buffers.copy(placed, self._shared.parameters)
        if placed.start < placed.stop:
            self._filled[placed.dtype].add(placed.start, placed.stop)
        # In the order of the buckets, which is the same on all holders.
        while self._to_begin and self._is_filled(self._to_begin[0]):
            dtype, start, stop = self._to_begin.popleft()
            self._under_way.append(self._begun(buffers.tensors[dtype][start:stop]))
        return there

    def _is_filled(self, bucket: _Bucket) -> bool:
        return self._filled[bucket.dtype].has(bucket.start, bucket.stop)

    def _begun(self, bucket: Tensor) -> dist.Work:
        try:
            work = dist.all_reduce(bucket, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._lost("summing gradients") from error
        assert isinstance(work, dist.Work)
        return work

    def summed(self, waiting: str) -> FlatBuffers:
        assert self._buffers is not None
        patience = self._transport.patience
        for work in self._under_way:
            try:
                work.wait(timedelta(seconds=patience.seconds))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    raise DeadlineError(
                        f"{waiting}: rank {self._others} did not answer within "
                        f"{patience.seconds:g} s; see what they printed last, or raise "
                        f"{patience.argument}"
                    ) from error
                raise self._lost(waiting) from error
        self._under_way.clear()
        return self._buffers[1]

    @property
    def _others(self) -> str:
        return " or ".join(map(str, sorted(self._shared.others(self._rank))))

    def _lost(self, waiting: str) -> PeerError:
        reason = f"rank {self._others} is gone (its process ended or was killed)"
        return PeerError(f"{waiting}: {reason}", reason)

    def close(self, *, failed: bool) -> None:
        self.closed = True
