"""``AllReducer``: sums by ``torch.distributed``, in buckets: the library's own order of adding."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import DeadlineError, PeerError
from penstock.reduce.flat import FlatBuffers, FlatLayout
from penstock.reduce.handing import FlatReducer
from penstock.reduce.reducer import SharedWeights
from penstock.transport import Transport, groups

_BUCKET_BYTES = 25 * 2**20


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
        self._under_way: list[dist.Work] = []
        self.closed = False

    def release(self) -> None:
        """Let go of the group, which has been destroyed."""
        self._group = None

    def give(self, layout: FlatLayout) -> tuple[int, ...]:
        if self._buffers is None or self._buffers[0] is not layout:
            self._buffers = layout, FlatBuffers(layout)
        _, buffers = self._buffers
        absent = buffers.fill(self._shared.parameters)
        self._under_way = [
            self._begun(bucket)
            for tensor in buffers.tensors.values()
            for bucket in torch.split(tensor, _BUCKET_BYTES // tensor.element_size())
        ]
        return absent

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
