"""PipeDream beside data, model and hybrid parallelism and GPipe; what data parallelism costs."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

import penstock as pk
from benchmarks.lectures.answer import Answer, never_falls, times
from benchmarks.lectures.claims import (
    BESIDE_INTRA_BATCH,
    GPIPE,
    HOSTS,
    OVERHEAD_DEVICES,
    OVERHEAD_MODELS,
    SPEED_UPS,
    GPipeSlowdown,
    SpeedUp,
)
from benchmarks.lectures.measured import figure
from benchmarks.lectures.works import WORKS, graph_of, learning_seconds

_PATIENCE_SECONDS = 60.0
_GENERATIONS = ("titan-x", "v100-pcie", "v100-sxm2")

_MEMORY_BYTES = 16 * 10**9
"""The V100 of both clouds; the catalogue's has twice as much."""


def _roomy(host: str, hosts: int, devices: int) -> pk.Cluster:
    """Devices whose memory is not limited: the lectures' minibatches fitted; which they were, they
    do not say."""
    cluster = pk.Cluster.of(host, hosts=hosts, devices_per_host=devices)
    roomy = tuple(replace(device, memory_bytes=0) for device in cluster.devices)
    return replace(cluster, devices=roomy)


def data_parallel(model: str, host: str, hosts: int, devices: int) -> pk.Plan:
    """A copy of a model on every device, each with its rows."""
    return _copies(model, _roomy(host, hosts, devices), HOSTS[host][1])


def _copies(model: str, cluster: pk.Cluster, device: str) -> pk.Plan:
    count, rows = len(cluster.devices), WORKS[model].rows
    return pk.plan(
        graph_of(model, device), cluster, schedule="1f1b", replicas=(count,),
        microbatches=count, minibatch=count * rows, reducer="all-reduce",
        recompute="never",
    )  # fmt: skip


def pipedream(row: SpeedUp, replicas: tuple[int, ...] | str) -> pk.Plan:
    """PipeDream on the devices of a row; memory is not limited, as cuts are the point here."""
    cluster = _roomy(row.host, row.hosts, row.devices)
    count, rows = 4 * row.num_devices, WORKS[row.model].rows
    return pk.plan(
        graph_of(row.model, HOSTS[row.host][1]), cluster, schedule="pipedream", replicas=replicas,
        microbatches=count, minibatch=count * rows, recompute="never",
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
    """GPipe at PipeDream's depth and at the largest one, GNMT-16.

    "Depth" is what is under way at once: the microbatches of a flush."""
    for row in GPIPE:
        count = row.num_devices
        if row.is_deepest:
            count = _most_microbatches(row)
        loss = _gpipe_loss(row, count)
        depth = f"largest depth, {count}" if row.is_deepest else "same depth"
        yield Answer(
            f"GPipe below PipeDream, GNMT-16 ({HOSTS[row.host][0]}), {depth}",
            f"{row.published:.0%}",
            f"{loss:.0%}",
            loss / row.published,
            measured="" if row.is_deepest else figure("GPipe below PipeDream"),
            note="As many microbatches as 16 GB hold with recompute, at most 16 times PipeDream's."
            if row.is_deepest else "",
        )  # fmt: skip


def _flushed(row: GPipeSlowdown, count: int, memory_bytes: int | None = None) -> pk.Plan:
    return pk.plan(
        graph_of("GNMT-16", HOSTS[row.host][1]), _roomy(row.host, row.hosts, row.devices),
        schedule="gpipe", replicas=(1,) * row.num_devices, microbatches=count,
        minibatch=count * WORKS["GNMT-16"].rows, recompute="stage", memory_bytes=memory_bytes,
        patience_seconds=_PATIENCE_SECONDS,
    )  # fmt: skip


def _most_microbatches(row: GPipeSlowdown) -> int:
    """Twice as many as long as they fit."""
    count = row.num_devices
    while count < 16 * row.num_devices:
        try:
            _flushed(row, 2 * count, _MEMORY_BYTES)
        except pk.PlanError:
            break
        count *= 2
    return count


def _gpipe_loss(row: GPipeSlowdown, count: int) -> float:
    wanted = SpeedUp("GNMT-16", row.host, row.hosts, row.devices, (), 0.0)
    full = per_microbatch(pipedream(wanted, wanted.given))
    return 1 - full / per_microbatch(_flushed(row, count))


def intra_batch() -> Iterator[Answer]:
    """PipeDream beside the same stages with one minibatch at a time, on four devices of A."""
    for row in BESIDE_INTRA_BATCH:
        full = per_microbatch(pipedream(row, row.given))
        # Without pipelining, a minibatch is through before the next one begins: copies of the
        # first stage take a microbatch each.
        flushed = pk.plan(
            graph_of(row.model, HOSTS[row.host][1]), _roomy(row.host, row.hosts, row.devices),
            schedule="gpipe", replicas=row.given, microbatches=max(row.given),
            minibatch=max(row.given) * WORKS[row.model].rows, recompute="never",
            patience_seconds=_PATIENCE_SECONDS,
        )  # fmt: skip
        is_hybrid = max(row.given) > 1
        kind = "hybrid" if is_hybrid else "model"
        yield Answer(
            f"PipeDream over {kind} parallelism, {row.model}, 1×4 (A)",
            "more, a bar",
            times([per_microbatch(flushed) / full], 2),
            holds=per_microbatch(flushed) > full,
            measured="" if is_hybrid else figure("PipeDream over model parallelism"),
        )


def overheads() -> Iterator[Answer]:
    """The share of a step that data parallelism's sums take, over the number of devices."""
    for host in ("cluster-a", "cluster-b"):
        devices = 4 if host == "cluster-a" else 8
        for model in OVERHEAD_MODELS:
            shares = []
            alone = learning_seconds(graph_of(model, HOSTS[host][1]))
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
    """Two generations of devices: how long, and how much of it is spent on sums."""
    old = per_microbatch(data_parallel("VGG-16", "cluster-c", 8, 1))
    new = per_microbatch(data_parallel("VGG-16", "cluster-b", 1, 8))
    yield Answer(
        "VGG-16 on 8 Titan X (40 Gbit/s) over 8 V100 (NVLink), data parallelism",
        "220 h over less than 100 h",
        f"{old / new:.1f}×",
        holds=old / new > 2.2,
        note="The lecture does not say which clusters and methods its hours are of.",
    )
    cluster, shares = _roomy("cluster-c", 8, 1), []
    for device in ("titan-x", "v100-sxm2"):
        seconds = _copies("VGG-16", cluster, device).step_seconds
        shares.append(1 - learning_seconds(graph_of("VGG-16", device)) / seconds)
    yield Answer(
        "beside compute, VGG-16 on 8 Titan X, and on 8 V100 of the same network (40 Gbit/s)",
        "faster GPUs make it worse",
        " ".join(f"{share:.0%}" for share in shares),
        holds=shares[1] > shares[0],
    )
    for name, work in WORKS.items():
        graphs = (graph_of(name, device) for device in _GENERATIONS)
        times_taken = [learning_seconds(graph) for graph in graphs]
        yield Answer(
            f"{name}, {work.rows} rows: ms on Titan X, V100 (PCIe), V100 (NVLink)",
            "less on faster GPUs",
            " ".join(f"{seconds * 1e3:.0f}" for seconds in times_taken),
            holds=never_falls(times_taken[::-1]),
        )
