"""What Penstock predicts where a lecture gives a result."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

import penstock as pk
from benchmarks.lectures.claims import (
    GPIPE,
    HOSTS,
    OVERHEAD_DEVICES,
    OVERHEAD_MODELS,
    PARTIME_FEATURES,
    PARTIME_KERNEL,
    PARTIME_LAYERS,
    PARTIME_PIXELS,
    PARTIME_STAGES,
    SPEED_UPS,
    GPipeSlowdown,
    SpeedUp,
)
from benchmarks.lectures.works import WORKS, graph_of, momentum
from penstock.core.summation.split import best_split

_PATIENCE_SECONDS = 60.0
_UNLIMITED = 10**12
"""The lectures' minibatches fitted; which they were, they do not say."""

_PARTIME_HOST, _PARTIME_DEVICE = "dgx-v100", "v100-sxm2"
"""The lecture says "8-GPU node" only."""


class Answer(NamedTuple):
    """A row of the page.

    Attributes:
        result: what is compared, in words.
        published, predicted: as they are shown.
        ratio: of the predicted figure to the published one, where both are numbers.
        holds: whether a direction, which has no number, is the published one.
        note: what else is to be said.
    """

    result: str
    published: str
    predicted: str
    ratio: float | None = None
    holds: bool | None = None
    note: str = ""


def data_parallel(model: str, host: str, hosts: int, devices: int) -> pk.Plan:
    """A copy of a model on every device, each with its rows."""
    count, rows = hosts * devices, WORKS[model].rows
    cluster = pk.Cluster.of(host, hosts=hosts, devices_per_host=devices)
    return pk.plan(
        graph_of(model, HOSTS[host][1]), cluster, schedule="1f1b", replicas=(count,),
        microbatches=count, minibatch=count * rows, reducer="all-reduce",
        recompute="never", memory_bytes=_UNLIMITED,
    )  # fmt: skip


def pipedream(row: SpeedUp, replicas: tuple[int, ...] | str) -> pk.Plan:
    """PipeDream on the devices of a row; memory is not limited, as cuts are the point here."""
    cluster = pk.Cluster.of(row.host, hosts=row.hosts, devices_per_host=row.devices)
    count, rows = 4 * row.num_devices, WORKS[row.model].rows
    return pk.plan(
        graph_of(row.model, HOSTS[row.host][1]), cluster, schedule="pipedream", replicas=replicas,
        microbatches=count, minibatch=count * rows, recompute="never", memory_bytes=_UNLIMITED,
        patience_seconds=_PATIENCE_SECONDS,
    )  # fmt: skip


def per_microbatch(plan: pk.Plan) -> float:
    """Seconds, which the time of an epoch is in proportion to: all have as many rows."""
    return plan.step_seconds / plan.num_microbatches


def speed_ups() -> Iterator[Answer]:
    """PipeDream's epoch time over data parallelism, with the published configuration, and the
    planner's own choice."""
    for row in SPEED_UPS:
        copies = data_parallel(row.model, row.host, row.hosts, row.devices)
        given = copies if len(row.given) == 1 else pipedream(row, row.given)
        own = pipedream(row, "any")
        ratio = per_microbatch(copies) / per_microbatch(given)
        best = per_microbatch(copies) / per_microbatch(own)
        name = "-".join(map(str, row.replicas)) or "straight"
        chosen = "-".join(map(str, own.replicas)) if {*own.replicas} != {1} else "straight"
        title = HOSTS[row.host][0]
        yield Answer(
            f"{row.model}, {row.hosts}×{row.devices} ({title}), {name}",
            f"{row.published:.2f}×",
            f"{ratio:.2f}×",
            ratio / row.published,
            note=f"Penstock would take {chosen}: {best:.2f}×. {row.why}".strip(),
        )


def gpipe_slowdowns() -> Iterator[Answer]:
    """GPipe at PipeDream's depth, GNMT-16."""
    for row in GPIPE:
        loss = _gpipe_loss(row)
        yield Answer(
            f"GPipe below PipeDream, GNMT-16 ({HOSTS[row.host][0]}), same depth",
            f"{row.published:.0%}",
            f"{loss:.0%}",
            loss / row.published,
        )


def _gpipe_loss(row: GPipeSlowdown) -> float:
    wanted = SpeedUp("GNMT-16", row.host, row.hosts, row.devices, (), 0.0)
    count, rows = wanted.num_devices, WORKS["GNMT-16"].rows
    # As in the paper, as many microbatches are under way as PipeDream has.
    flushed = pk.plan(
        graph_of("GNMT-16", HOSTS[row.host][1]),
        pk.Cluster.of(row.host, hosts=row.hosts, devices_per_host=row.devices),
        schedule="gpipe", replicas=wanted.given, microbatches=count, minibatch=count * rows,
        recompute="stage", memory_bytes=_UNLIMITED, patience_seconds=_PATIENCE_SECONDS,
    )  # fmt: skip
    full = per_microbatch(pipedream(wanted, wanted.given))
    return 1 - full / per_microbatch(flushed)


def overheads() -> Iterator[Answer]:
    """The share of a step that data parallelism's sums take, over the number of devices."""
    for host in ("cluster-a", "cluster-b"):
        devices = 4 if host == "cluster-a" else 8
        for model in OVERHEAD_MODELS:
            shares = []
            alone = _learning_seconds(graph_of(model, HOSTS[host][1]))
            for count in OVERHEAD_DEVICES:
                each = min(count, devices)
                plan = data_parallel(model, host, count // each, each)
                shares.append(max(1 - alone / plan.step_seconds, 0.0))
            yield Answer(
                f"beside compute, {model} on 1 … 32 GPUs ({HOSTS[host][0]})",
                "more with more GPUs",
                " ".join(f"{share:.0%}" for share in shares),
                holds=shares[0] <= shares[2] + 0.02 and shares[2] <= shares[-1] + 0.02,
            )


def faster_devices() -> Iterator[Answer]:
    """VGG-16 with data parallelism on eight devices of two generations."""
    old = per_microbatch(data_parallel("VGG-16", "cluster-c", 8, 1))
    new = per_microbatch(data_parallel("VGG-16", "cluster-b", 1, 8))
    yield Answer(
        "VGG-16 on 8 Titan X (40 Gbit/s) over 8 V100 (NVLink), data parallelism",
        "220 h over less than 100 h",
        f"{old / new:.1f}×",
        holds=old / new > 2.2,
        note="The lecture does not say which clusters and methods its hours are of.",
    )


def summation_servers() -> Iterator[Answer]:
    """VGG-16 on 4 × 8 GPUs behind one card each, by the time that sums take alone."""
    num_bytes = sum(layer.parameter_bytes for layer in graph_of("VGG-16", "v100-sxm2").layers)
    hosts, rate = 4, 12.5e9  # 100 Gbit/s
    reduced = 2 * (hosts - 1) / hosts * num_bytes / rate
    times = [
        best_split(num_bytes, [rate] * hosts, [rate] * spares).seconds
        for spares in range(hosts + 1)
    ]
    yield Answer(
        "BytePS, VGG-16 on 4 × 8: k = 0 … n CPU machines against all-reduce",
        "up to 1.2× of a whole step",
        " ".join(f"{reduced / seconds:.2f}×" for seconds in times),
        holds=abs(reduced / times[0] - 1) < 1e-6 and times == sorted(times, reverse=True),
        note="of the exchange alone: 2(n−1)/n with as many CPU machines as GPU machines.",
    )


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
        device=_PARTIME_DEVICE, software=software, optimizer=momentum,
    )  # fmt: skip


def _learning_seconds(graph: pk.LayerGraph) -> float:
    return sum(layer.forward_seconds + layer.backward_seconds for layer in graph.layers)


class StreamSpeedUp(NamedTuple):
    """Of a network at a resolution: frames per second over those of one device, by the number of
    stages of ``PARTIME_STAGES``, with the host's pace and without."""

    eager: tuple[float, ...]
    replayed: tuple[float, ...]


def stream_speed_up(layers: int, features: int, kernel: int, pixels: int) -> StreamSpeedUp:
    """PARTIME's: one process issues the kernels of all devices, unless a graph is replayed."""
    graph = _convolutions(layers, features, kernel, pixels, "graph")
    # A picture of one pixel takes what the host needs to issue a frame's kernels.
    host = _learning_seconds(_convolutions(layers, features, kernel, 1, "eager"))
    device = _learning_seconds(graph)
    ticks = [
        pk.plan(
            graph, pk.Cluster.of(_PARTIME_HOST, devices_per_host=stages), schedule="partime",
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
        yield Answer(f"PARTIME: {direction}", "direction", "holds" if holds else "does not", None,
                     holds)  # fmt: skip


_GPIPE_TRANSFORMER = {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)}
"""GPipe's Table 2: by microbatches, the throughput on 2, 4 and 8 accelerators, over 2 with one."""


def gpipe_table() -> Iterator[Answer]:
    """GPipe's Transformer: equal layers, so that the schedule alone decides."""

    def throughput(stages: int, microbatches: int) -> float:
        schedule = pk.schedules.build("gpipe", num_ranks=stages, num_microbatches=microbatches)
        # A forward is a unit of a stage; with K stages it takes a K-th, of a microbatch an M-th.
        return stages * microbatches / pk.simulate(schedule).makespan

    for microbatches, published in _GPIPE_TRANSFORMER.items():
        own = [throughput(k, microbatches) / throughput(2, 1) for k in (2, 4, 8)]
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
        for stages in (2, 4, 8)
    }
    yield Answer(
        "GPipe's bubble at M = 4K, K = 2, 4, 8",
        "almost negligible",
        " ".join(f"{bubble:.0%}" for bubble in bubbles.values()),
        holds=max(bubbles.values()) < 0.2,
    )


PARTS = {
    "PipeDream: epoch time over data parallelism": speed_ups,
    "PipeDream against GPipe": gpipe_slowdowns,
    "What data parallelism costs": overheads,
    "Faster devices": faster_devices,
    "BytePS": summation_servers,
    "GPipe": gpipe_table,
    "PARTIME": streams,
}
"""By their titles, the parts of the page."""
