"""GPipe's tables: throughput over accelerators and microbatches, and how large a model may be."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal

import torch

import penstock as pk
from benchmarks.lectures.answer import Answer
from benchmarks.lectures.claims import AMOEBANET_WIDTHS, GPIPE_AMOEBANET, GPIPE_TRANSFORMER
from benchmarks.lectures.works import learning_seconds, momentum
from examples.models import amoebanet

_STAGES = (2, 4, 8)
_HOST, _DEVICE = "dgx-v100", "v100-sxm2"
"""GPipe's table is of TPUs; only how layers' times are to each other counts here."""

_ROWS = 4
_PATIENCE_SECONDS = 10.0


def gpipe_table() -> Iterator[Answer]:
    """Both tables, and the bubble."""
    yield from transformer_table()
    yield from _amoebanet_table()
    yield from _largest_models()


def transformer_table() -> Iterator[Answer]:
    """GPipe's Transformer: equal layers, so that the schedule alone decides."""

    def throughput(stages: int, microbatches: int) -> float:
        schedule = pk.schedules.build("gpipe", num_ranks=stages, num_microbatches=microbatches)
        # A forward is a unit of a stage; with K stages it takes a K-th, of a microbatch an M-th.
        return stages * microbatches / pk.simulate(schedule).makespan

    for microbatches, published in GPIPE_TRANSFORMER.items():
        own = [throughput(k, microbatches) / throughput(2, 1) for k in _STAGES]
        yield Answer(
            f"GPipe's Transformer on 2, 4, 8 accelerators, M = {microbatches}",
            " ".join(f"{ratio:g}" for ratio in published),
            " ".join(f"{ratio:.1f}" for ratio in own),
            own[-1] / published[-1],
            note="Its batch grew with M, ours does not." if microbatches == 4 else "",
        )
    bubbles = {
        stages: pk.simulate(
            pk.schedules.build("gpipe", num_ranks=stages, num_microbatches=4 * stages)
        ).bubble
        for stages in _STAGES
    }
    yield Answer(
        "GPipe's bubble at M = 4K, K = 2, 4, 8",
        "almost negligible",
        " ".join(f"{bubble:.0%}" for bubble in bubbles.values()),
        holds=max(bubbles.values()) < 0.2,
    )


@cache
def _amoebanet(width: int) -> pk.LayerGraph:
    with torch.device("meta"):
        model = amoebanet.AmoebaNet(layers=18, width=width, classes=1000)
        images, classes = torch.empty(_ROWS, 3, 224, 224), torch.empty(_ROWS, dtype=torch.long)
    return pk.estimate(
        model, images, targets=classes, loss=amoebanet.loss, device=_DEVICE, optimizer=momentum,
        granularity="block",
    )  # fmt: skip


def _amoebanet_table() -> Iterator[Answer]:
    graph = _amoebanet(AMOEBANET_WIDTHS[0][0])
    alone = learning_seconds(graph)

    def throughput(stages: int, microbatches: int) -> float:
        cluster = pk.Cluster.of(_HOST, devices_per_host=stages)
        plan = pk.plan(
            graph, cluster, schedule="gpipe", stages=stages, microbatches=microbatches,
            recompute="stage", memory_bytes=10**12, patience_seconds=_PATIENCE_SECONDS,
        )  # fmt: skip
        return microbatches * alone / plan.step_seconds

    for microbatches, published in GPIPE_AMOEBANET.items():
        own = [throughput(k, microbatches) / throughput(2, 1) for k in _STAGES]
        yield Answer(
            f"GPipe's AmoebaNet-D on 2, 4, 8 accelerators, M = {microbatches}",
            " ".join(f"{ratio:g}" for ratio in published),
            " ".join(f"{ratio:.2f}" for ratio in own),
            own[-1] / published[-1],
            note="The table is of TPUs; why it gains less there, nobody says."
            if microbatches == 32
            else "",
        )


def _largest_models() -> Iterator[Answer]:
    """Whether the larger network with recompute fits where the smaller one fits without."""

    def num_bytes(width: int, recompute: Literal["never", "layers"]) -> int:
        plan = pk.plan(
            _amoebanet(width), pk.Cluster.of(_HOST, devices_per_host=1), schedule="gpipe",
            stages=1, microbatches=4, recompute=recompute, memory_bytes=10**12,
        )  # fmt: skip
        return max(plan.rank_bytes)

    small, large = (width for width, _ in AMOEBANET_WIDTHS)
    whole, again = num_bytes(small, "never"), num_bytes(large, "layers")
    sizes = [parameters for _, parameters in AMOEBANET_WIDTHS]
    yield Answer(
        f"GPipe's AmoebaNet-D on one accelerator: {sizes[0]} M parameters without recompute, "
        f"{sizes[1]} M with it",
        "in the same 8 GB",
        f"{whole / 1e9:.1f} GB, {again / 1e9:.1f} GB",
        note=f"Of {4 * _ROWS} rows in four microbatches. The lecture names no batch, and whether "
        "8 GB hold both depends on it: no verdict.",
    )
