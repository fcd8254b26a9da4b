"""PARTIME's speed-up over resolutions, with and without CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

import penstock as pk
from benchmarks.lectures.answer import Answer
from benchmarks.lectures.claims import (
    PARTIME_FEATURES,
    PARTIME_KERNEL,
    PARTIME_LAYERS,
    PARTIME_PIXELS,
    PARTIME_STAGES,
)
from benchmarks.lectures.measured import stream_curve
from benchmarks.lectures.works import learning_seconds, momentum
from benchmarks.streaming.convolutions import NETWORKS

_HOST, _DEVICE = "dgx-v100", "v100-sxm2"
"""The lecture says "8-GPU node" only."""

_WHY_NOT = {
    "without CUDA graphs hardly any": "The lecture's launches cost more than the pace of a host "
    "here, or its pictures were smaller than 64 pixels: it prints neither."
}


@cache
def _convolutions(
    layers: int, features: int, kernel: int, pixels: int, software: str
) -> pk.LayerGraph:
    channels = pairwise([3] + [features] * layers)
    with torch.device("meta"):
        model = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, kernel, padding=kernel // 2), nn.ReLU())
                for before, after in channels
            )
        )
        frame = torch.empty(1, 3, pixels, pixels)
        target = torch.empty(1, features, pixels, pixels)
    return pk.estimate(
        model, frame, targets=target, loss=nn.functional.mse_loss,
        device=_DEVICE, software=software, optimizer=momentum,
    )  # fmt: skip


class StreamSpeedUp(NamedTuple):
    """Of a network at a resolution: frames per second over those of one device, by the number of
    stages of ``PARTIME_STAGES``, with the host's pace and without."""

    eager: tuple[float, ...]
    replayed: tuple[float, ...]


def stream_speed_up(layers: int, features: int, kernel: int, pixels: int) -> StreamSpeedUp:
    """PARTIME's: one process issues the kernels of all devices, unless a graph is replayed."""
    graph = _convolutions(layers, features, kernel, pixels, "graph")
    # A picture of one pixel takes what the host needs to issue a frame's kernels.
    host = learning_seconds(_convolutions(layers, features, kernel, 1, "eager"))
    device = learning_seconds(graph)
    ticks = [
        pk.plan(
            graph, pk.Cluster.of(_HOST, devices_per_host=stages), schedule="partime",
            stages=stages, microbatches=32, minibatch=32,
        ).step_seconds / 32
        for stages in PARTIME_STAGES
    ]  # fmt: skip
    return StreamSpeedUp(
        tuple(max(device, host) / max(tick, host) for tick in ticks),
        tuple(device / tick for tick in ticks),
    )


PARTIME_NETWORKS = {
    "base": (PARTIME_LAYERS, PARTIME_FEATURES, PARTIME_KERNEL),
    "layers × 3": (3 * PARTIME_LAYERS, PARTIME_FEATURES, PARTIME_KERNEL),
    "features × 3": (PARTIME_LAYERS, 3 * PARTIME_FEATURES, PARTIME_KERNEL),
    "kernel × 3": (PARTIME_LAYERS, PARTIME_FEATURES, 3 * PARTIME_KERNEL),
}


_TITLES = dict(zip(PARTIME_NETWORKS, (network.title for network in NETWORKS), strict=True))
"""Of the same networks in ``benchmarks.streaming``."""


def streams() -> Iterator[Answer]:
    """PARTIME on 2, 4 and 8 GPUs, over resolutions, with and without CUDA graphs."""
    found = {
        (name, pixels): stream_speed_up(*sizes, pixels)
        for name, sizes in PARTIME_NETWORKS.items()
        for pixels in PARTIME_PIXELS
    }
    for name in PARTIME_NETWORKS:
        for way in StreamSpeedUp._fields:
            yield Answer(
                f"PARTIME, {name}, {'with' if way == 'replayed' else 'without'} CUDA graphs",
                "a curve",
                "; ".join(
                    f"{pixels} px "
                    + " ".join(f"{ratio:.1f}" for ratio in getattr(found[name, pixels], way))
                    for pixels in PARTIME_PIXELS
                ),
                note="over one device, with 2, 4 and 8",
                measured=stream_curve(_TITLES[name], "64", way),
            )
    small, large = PARTIME_PIXELS[0], PARTIME_PIXELS[-1]
    deep, base = found["layers × 3", large], found["base", large]
    wide = found["kernel × 3", large]
    directions = {
        "the deeper, the more linear": deep.replayed[-1] > base.replayed[-1],
        "more at higher resolutions": base.replayed[-1] >= found["base", small].replayed[-1],
        "shallow networks have a plateau": base.replayed[-1] / base.replayed[-2]
        < deep.replayed[-1] / deep.replayed[-2],
        "without CUDA graphs hardly any": found["base", small].eager[-1] < 1.5,
        "except with large kernels at high resolutions": wide.eager[-1] > 2,
    }
    for direction, holds in directions.items():
        yield Answer(
            f"PARTIME: {direction}",
            "direction",
            "holds" if holds else "does not",
            holds=holds,
            note="" if holds else _WHY_NOT.get(direction, ""),
        )
