"""BytePS: VGG-16 on machines of eight devices, with and without machines that only sum."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from msgspec.structs import replace

import penstock as pk
from benchmarks.lectures.answer import Answer, never_falls, times
from benchmarks.lectures.measured import servers_measured
from benchmarks.lectures.works import WORKS, graph_of, learning_seconds
from penstock.core.summation.split import best_split

_MODEL, _MACHINES, _DEVICES = "VGG-16", 4, 8
_CARD_BYTES_PER_SECOND = 0.77 * 12.5e9
"""Of a CPU machine, as of the others: 100 Gbit/s, of which collectives reach 77 %."""

_NVLINK, _PCIE = "byteps-nvlink", "byteps-pcie"
_DEVICE = {_NVLINK: "v100-sxm2", _PCIE: "v100-pcie"}


@cache
def _step_seconds(host: str, machines: int, reducer: str, spares: int = 0) -> float:
    cluster, count = pk.Cluster.of(host, hosts=machines), machines * _DEVICES
    helpers = (
        pk.SpareMachine(name=f"cpu-{number}", bytes_per_second=_CARD_BYTES_PER_SECOND)
        for number in range(spares)
    )
    return pk.plan(
        graph_of(_MODEL, _DEVICE[host]), replace(cluster, spares=tuple(helpers)),
        schedule="1f1b", replicas=(count,), microbatches=count,
        minibatch=count * WORKS[_MODEL].rows, reducer=reducer, recompute="never",
        memory_bytes=10**12,
    ).step_seconds  # fmt: skip


def _images(host: str, machines: int, seconds: float) -> float:
    return machines * _DEVICES * WORKS[_MODEL].rows / seconds


def summation_servers() -> Iterator[Answer]:
    """Four machines: the ways to sum, and how many machines help."""
    yield _architectures()
    yield exchange_alone()
    for host, title in ((_NVLINK, "NVLink"), (_PCIE, "PCIe only")):
        alone = _step_seconds(host, _MACHINES, "all-reduce")
        ratios = [1.0] + [
            alone / _step_seconds(host, _MACHINES, "servers", spares)
            for spares in range(1, _MACHINES + 1)
        ]
        yield Answer(
            f"BytePS, VGG-16 on 4 × 8 ({title}): a step with k = 0 … 4 CPU machines over none",
            "up to 1.2×",
            times(ratios, 2),
            max(ratios) / 1.2,
            measured=servers_measured() if host == _NVLINK else "",
            note="Sums hide behind the backward here, so that there is less to win.",
        )
    yield from _machines()
    yield from _parts_switched_off()


def _architectures() -> Answer:
    linear = learning_seconds(graph_of(_MODEL, _DEVICE[_NVLINK]))
    seconds = {
        "parameter server": _step_seconds(_NVLINK, _MACHINES, "parameter-server", _MACHINES),
        "all-reduce": _step_seconds(_NVLINK, _MACHINES, "all-reduce"),
        "BytePS": _step_seconds(_NVLINK, _MACHINES, "servers", _MACHINES),
        "linear": linear,
    }
    rates = [_images(_NVLINK, _MACHINES, each) for each in seconds.values()]
    return Answer(
        f"VGG-16 on 4 × 8: images/s of {', '.join(seconds)}",
        "in this order",
        " ".join(f"{rate:.0f}" for rate in rates),
        holds=never_falls(rates),
        note="As many servers as machines.",
    )


def exchange_alone() -> Answer:
    """What servers do to the time of the sums by themselves."""
    num_bytes = sum(layer.parameter_bytes for layer in graph_of(_MODEL, "v100-sxm2").layers)
    reduced = 2 * (_MACHINES - 1) / _MACHINES * num_bytes / _CARD_BYTES_PER_SECOND
    seconds = [
        best_split(
            num_bytes, [_CARD_BYTES_PER_SECOND] * _MACHINES, [_CARD_BYTES_PER_SECOND] * spares
        ).seconds
        for spares in range(_MACHINES + 1)
    ]
    return Answer(
        "BytePS, VGG-16 on 4 × 8: the exchange alone with k = 0 … 4 CPU machines over all-reduce",
        "none with k = 0, most with k = n",
        times([reduced / each for each in seconds], 2),
        holds=abs(reduced / seconds[0] - 1) < 1e-6 and never_falls([-each for each in seconds]),
        note="2(n−1)/n with as many CPU machines as GPU machines.",
    )


def _machines() -> Iterator[Answer]:
    counts = (1, 2, 4, 8)
    single = _step_seconds(_NVLINK, 1, "all-reduce")
    # One machine has nobody to exchange with, whoever sums.
    seconds = {
        "all-reduce": [_step_seconds(_NVLINK, count, "all-reduce") for count in counts],
        "BytePS with k = n": [single]
        + [_step_seconds(_NVLINK, count, "servers", count) for count in counts[1:]],
    }
    for title, steps in seconds.items():
        rates = [count * single / step for count, step in zip(counts, steps, strict=True)]
        yield Answer(
            f"VGG-16, {title}: images/s on 1, 2, 4, 8 machines over one",
            "more with more machines",
            times(rates, 2),
            holds=never_falls(rates),
        )
    gains = [plain / ours for plain, ours in zip(*seconds.values(), strict=True)]
    yield Answer(
        "VGG-16, BytePS with k = n over all-reduce on 1, 2, 4, 8 machines",
        "more with more machines",
        times(gains, 2),
        holds=never_falls(gains) and gains[-1] > gains[0],
    )


def _parts_switched_off() -> Iterator[Answer]:
    whole = _step_seconds(_NVLINK, _MACHINES, "servers", _MACHINES)
    without = _step_seconds(_NVLINK, _MACHINES, "all-reduce")
    yield Answer(
        "BytePS on 4 × 8 without its servers (k = 0): a step over that with k = 4",
        "slower",
        times([without / whole], 2),
        holds=without > whole,
    )
    graph = graph_of(_MODEL, _DEVICE[_NVLINK])
    num_bytes = sum(layer.parameter_bytes for layer in graph.layers)
    count = _MACHINES * _DEVICES
    # Without topology every device exchanges with every other one, through its machine's card.
    flat = _DEVICES * 2 * (count - _DEVICES) / count * num_bytes / _CARD_BYTES_PER_SECOND
    near = 2 * (_MACHINES - 1) / _MACHINES * num_bytes / _CARD_BYTES_PER_SECOND
    yield Answer(
        "BytePS on 4 × 8 without topology: what crosses a card, over that with it",
        "slower",
        times([flat / near], 2),
        holds=flat > near,
        note="All of a machine's devices sum first, or each exchanges for itself.",
    )
    yield Answer(
        "BytePS without priority",
        "slower",
        "no prediction",
        note="Predictions know no forward that begins before all sums are there; with servers, "
        "parts of the first layers leave first.",
    )
