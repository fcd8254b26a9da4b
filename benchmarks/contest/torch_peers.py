"""torch's own ways to train on two ranks: its pipelines and its data parallelism.

They run at their best: with shapes given in advance (no dry run), without collecting the outputs,
with gradients scaled as Penstock does, in buckets without a second copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.works import Work
from benchmarks.contest.peers import Peer, accumulating, mean_in_order

NUM_RANKS = 2
_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_LOOPED = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
}
_V = {"zb-v": ScheduleZBVZeroBubble}


def torch_pipeline(family: str) -> Callable[[Work], Peer]:
    """A schedule of ``torch.distributed.pipelining``, by Penstock's name for it."""
    schedule = {**_SINGLE, **_LOOPED, **_V}[family]

    def build(work: Work) -> Peer:
        rank = dist.get_rank()
        if family in _SINGLE:
            return _pipeline(work, 2, [rank], lambda stages, *a, **k: schedule(stages[0], *a, **k))
        mine = [rank, 3 - rank] if family in _V else [rank, rank + NUM_RANKS]
        return _pipeline(work, 4, mine, schedule)

    return build


def _pipeline(work: Work, num_stages: int, mine: Sequence[int], make: Callable[..., Any]) -> Peer:
    layers, cut = work.layers(), work.stages(num_stages)
    parts = [nn.Sequential(*(layers[index] for index in indices)) for indices in cut]
    values = [work.inputs.chunk(work.num_microbatches)[0]]
    with torch.no_grad():
        for part in parts:
            values.append(part(values[-1]))
    values[1:] = [value.requires_grad_() for value in values[1:]]
    device = torch.device("cpu")
    stages = [
        PipelineStage(parts[index], index, num_stages, device, values[index], values[index + 1])
        for index in mine
    ]
    schedule = make(stages, work.num_microbatches, loss_fn=work.loss)

    def backward(inputs: Tensor, targets: Tensor) -> Tensor | None:
        given = (inputs,) if 0 in mine else ()
        if num_stages - 1 not in mine:
            schedule.step(*given, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(*given, target=targets, losses=losses, return_outputs=False)
        return mean_in_order(losses, work.num_microbatches)

    indices = [index for stage in mine for index in cut[stage]]
    return accumulating(work, nn.Sequential(*(layers[i] for i in indices)), indices, backward)


def data_parallel(work: Work) -> Peer:
    """``DistributedDataParallel``: the whole model on both ranks, half of the microbatches each."""
    model = nn.Sequential(*work.layers())
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    count = work.num_microbatches // NUM_RANKS
    mine = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)

    def backward(inputs: Tensor, targets: Tensor) -> Tensor:
        cut = [value.chunk(work.num_microbatches)[mine] for value in (inputs, targets)]
        losses = []
        for index, (part, wanted) in enumerate(zip(*cut, strict=True), start=1):
            with contextlib.nullcontext() if index == count else replica.no_sync():
                value = work.loss(replica(part), wanted)
                (value / count).backward()
            losses.append(value.detach().clone())
        return mean_in_order(losses, work.num_microbatches)

    return accumulating(work, model, range(len(model)), backward, shares=True, same_order=False)


PEERS: dict[str, Callable[[Work], Peer]] = {
    "torch GPipe": torch_pipeline("gpipe"),
    "torch 1F1B": torch_pipeline("1f1b"),
}
"""One stage per rank."""
