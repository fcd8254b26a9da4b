"""Frames per second of N devices over one device, for the lecture's four networks, over
resolutions.

    python -m benchmarks.streaming.speed_up [--pixels 16 32 64] [--devices 2 4 8]
        [--launches eager replayed] [--seconds 1] [--quick] [--picture PATH]

The networks keep the size of the picture: 10 layers of 16 features with 5 × 5 kernels, and three
times as many layers, features, or pixels along a kernel's edge. One device really learns from
frames of each resolution, with one thread, and so do two stages on two cores. More devices than
this machine has cores are emulated: every one is a real process that performs partime's order with
real messages, and waits as long as its layers took on one device (profiled at that resolution). So
small pictures show what a tick costs besides its kernels, and large ones what cuts allow.

``--launches`` says how a tick's kernels are launched on the two cores: each by itself (``eager``),
or all of a stage's as one call (``replayed``, ``pk.stream(…, replay=True)``, which the CPU compiles
first). Run it alone on a machine: the ranks of eight devices share its cores.

one device     milliseconds to learn from a frame
slowest        what cuts allow: all layers over the slowest stage, as profiled
emulated       N devices that wait where they would compute
measured       two stages on two cores, over one device of one thread
latency        from a frame's arrival to its output in a stream that is as fast as can be, in ms,
               of the emulated devices
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.streaming.convolutions import (
    NETWORKS,
    WARM_UP,
    Network,
    OneDevice,
    opened,
    profiled,
    streamed,
)
from penstock import Costs, schedules
from penstock.core.schedule import Kind
from penstock.drawing.chart import line_chart
from penstock.planning.partition import balance
from penstock.training.rehearsal import Rehearsal, rehearse

LAUNCHES: dict[str, Mapping[str, Any]] = {"eager": {}, "replayed": {"replay": True}}
"""By name, options of ``pk.stream`` that say how a tick's kernels are launched."""

COLUMNS = (
    "network", "pixels", "launch", "N", "one device", "slowest", "emulated", "measured", "latency",
)  # fmt: skip
_FEWEST_FRAMES, _MOST_FRAMES_PER_DEVICE = 6, 10


class Shares(NamedTuple):
    """Seconds of a frame's layers on one device, as N devices have them.

    Attributes:
        layers: forward, backward and update of each.
        num_devices: N.
    """

    layers: tuple[float, ...]
    num_devices: int

    @classmethod
    def of(cls, graph: pk.LayerGraph, num_devices: int) -> Shares:
        """As they were profiled."""
        seconds = (
            layer.forward_seconds + layer.backward_seconds + layer.update_seconds
            for layer in graph.layers
        )
        return cls(tuple(seconds), num_devices)

    @property
    def stages(self) -> tuple[float, ...]:
        """Seconds of each stage per frame, cut so that the slowest is as fast as possible."""
        bounds = pairwise(balance(self.layers, self.num_devices))
        return tuple(sum(self.layers[first:end]) for first, end in bounds)

    @property
    def speed_up(self) -> float:
        """What cuts allow."""
        return sum(self.layers) / max(self.stages)

    def emulate(self, num_frames: int) -> Rehearsal:
        """Let N processes perform it."""
        schedule = schedules.build(
            "partime", num_ranks=self.num_devices, num_microbatches=num_frames
        )
        third = tuple(stage / 3 for stage in self.stages)
        return rehearse(schedule, Costs(third, third, third), steps=2)


class Resolution(NamedTuple):
    """A network with frames of a size, on this machine.

    Attributes:
        network, pixels: which, and how large its frames are along the edge.
        graph: its layers as profiled.
        seconds: of one device per frame.
    """

    network: Network
    pixels: int
    graph: pk.LayerGraph
    seconds: float

    @classmethod
    def measured(cls, network: Network, pixels: int, budget_seconds: float) -> Resolution:
        """Profile it, and let one device learn for about so long."""
        alone = OneDevice(network, 1, pixels)
        first = alone.run(2).wall
        count = max(_FEWEST_FRAMES, round(budget_seconds / first))
        return cls(network, pixels, profiled(network, pixels), alone.run(count).wall)

    def on_two_cores(self, options: Mapping[str, Any], budget_seconds: float) -> float:
        """Speed-up of two real stages."""
        count = max(_FEWEST_FRAMES, round(budget_seconds / self.seconds))
        with opened(self.network, self.graph, self.pixels, options=options) as stream:
            return self.seconds / streamed(stream, count + WARM_UP, self.pixels).wall

    def rows(
        self, devices: Sequence[int], launches: Sequence[str], budget_seconds: float
    ) -> Iterator[Row]:
        """One per number of devices; of two, one per launch."""
        for num_devices in devices:
            emulated = self._emulated(num_devices, budget_seconds)
            if num_devices != 2:
                yield Row(self, "", num_devices, emulated)
                continue
            for launch in launches:
                real = self.on_two_cores(LAUNCHES[launch], budget_seconds)
                yield Row(self, launch, num_devices, emulated, real)
                emulated = None  # it is the same however kernels are launched

    def _emulated(self, num_devices: int, budget_seconds: float) -> Emulated:
        shares = Shares.of(self.graph, num_devices)
        per_device = round(budget_seconds / self.seconds / 2)
        per_device = max(4, min(_MOST_FRAMES_PER_DEVICE, per_device))
        rehearsal = shares.emulate(num_devices * per_device)
        steady = rehearsal.steady_seconds
        assert steady is not None  # streams are long enough
        return Emulated(shares.speed_up, sum(shares.layers) / steady.measured, latency(rehearsal))


class Emulated(NamedTuple):
    """What devices that wait make of a stream.

    Attributes:
        allowed: speed-up that cuts allow.
        speed_up: what it was.
        latency_seconds: from a frame's arrival to its output.
    """

    allowed: float
    speed_up: float
    latency_seconds: float


class Row(NamedTuple):
    """Of the table; ratios are over one device."""

    resolution: Resolution
    launch: str
    num_devices: int
    emulated: Emulated | None
    real: float | None = None

    @property
    def cells(self) -> list[str]:
        """As ``COLUMNS``."""
        own = self.emulated
        return [
            self.resolution.network.title,
            f"{self.resolution.pixels}",
            self.launch,
            f"{self.num_devices}",
            f"{self.resolution.seconds * 1e3:.1f}",
            "" if own is None else f"{own.allowed:.2f}",
            "" if own is None else f"{own.speed_up:.2f}",
            "" if self.real is None else f"{self.real:.2f}",
            "" if own is None else f"{own.latency_seconds * 1e3:.0f}",
        ]


def latency(rehearsal: Rehearsal) -> float:
    """Seconds from the begin of a frame's forward at the first stage until its output, the mean
    over the middle half of the stream."""
    begins, ends = {}, {}
    last = rehearsal.measured.num_ranks - 1
    for span in rehearsal.measured.spans:
        if span.op.kind is Kind.FORWARD and span.op.stage == 0:
            begins[span.op.microbatch] = span.start
        if span.op.kind is Kind.FORWARD and span.op.stage == last:
            ends[span.op.microbatch] = span.end
    quarter = len(begins) // 4
    return fmean(ends[frame] - begins[frame] for frame in range(quarter, 3 * quarter))


def written(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|---|--:|---|" + "--:|" * (len(heads) - 3), *lines[1:]])


def curves(rows: Sequence[Row]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Emulated speed-up over devices: a line per network at its largest frames."""
    largest = max(row.resolution.pixels for row in rows)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.resolution.pixels == largest and row.emulated is not None:
            points = lines.setdefault(row.resolution.network.title, [])
            points.append((row.num_devices, row.emulated.speed_up))
    return list(lines.items())


def main() -> None:
    """All networks, resolutions and numbers of devices, a row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pixels", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--launches", nargs="+", choices=LAUNCHES, default=list(LAUNCHES))
    parser.add_argument("--seconds", type=float, default=1.0, help="that one device learns")
    parser.add_argument("--quick", action="store_true", help="one network, few frames")
    parser.add_argument("--picture", type=Path, help="SVG of the speed-ups, a line per network")
    options = parser.parse_args()
    networks = NETWORKS
    if options.quick:
        networks, options.seconds = NETWORKS[:1], 0.1
        options.pixels, options.devices = options.pixels[:1], options.devices[:2]
        options.launches = options.launches[:1]
    torch.set_num_threads(1)
    rows: list[Row] = []
    for network in networks:
        for pixels in options.pixels:
            resolution = Resolution.measured(network, pixels, options.seconds)
            for row in resolution.rows(options.devices, options.launches, options.seconds):
                rows.append(row)
                print(" ".join(row.cells), flush=True)
    print(f"\n{written(COLUMNS, [row.cells for row in rows])}")
    if options.picture:
        drawn = line_chart(curves(rows), "devices", "frames per second over one device")
        options.picture.write_text(drawn + "\n", encoding="utf-8")


if __name__ == "__main__":
    publish(main)
