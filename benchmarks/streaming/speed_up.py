"""Frames per second of N devices over one device, for the lecture's four networks.

    python -m benchmarks.streaming.speed_up [--devices 2 3 4 5 6 7 8] [--frames-per-device 10]
        [--hops 0 0.25] [--schedules partime pipedream] [--scale 1] [--quick] [--picture PATH]

The networks keep the size of the picture: 10 layers of 16 features with 5 × 5 kernels, and three
times as many layers, features, or pixels along a kernel's edge. Their layers' costs are in
proportion to multiplications, and one device takes T = 80 ms to learn from a frame, whichever
network it is. They are cut so that the slowest stage is as fast as possible.

Devices are emulated: every one is a real process that performs its schedule with real messages
through shared memory, and waits where it would compute. ``--hops`` are what a message takes on top,
in parts of T/N, the ideal tick. Run it alone on a machine: the ranks of eight devices share its
cores.

slowest        T over the slowest stage: what cuts allow; N if layers could be divided
foreseen       by the beat max(T_s, (N·T_s + 2(N−1)c)/(2N−1)) of partime, T_s + 2(N−1)c/N of
               pipedream, with all stages as slow as the slowest
simulated      by Penstock's simulator, with the hop that was measured in the same run
emulated       what was measured
latency        from a frame's arrival to its output, in ms: in a stream that is as fast as can be
               (measured), and N ticks
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.common.alone import publish
from penstock import Costs, schedules
from penstock.core.schedule import Kind
from penstock.drawing.chart import line_chart
from penstock.planning.partition import balance
from penstock.training.rehearsal import Rehearsal, rehearse

FRAME_SECONDS = 0.08
COLOURS = 3


class Network(NamedTuple):
    """Convolutions that keep the size of the picture.

    Attributes:
        title: for people.
        layers, features, kernel: how many, how wide, and along the edge.
    """

    title: str
    layers: int = 10
    features: int = 16
    kernel: int = 5

    @property
    def costs(self) -> list[float]:
        """Seconds of each layer to learn from a frame; ``FRAME_SECONDS`` in all."""
        widths = [COLOURS, *[self.features] * (self.layers - 1), COLOURS]
        products = [before * after * self.kernel**2 for before, after in pairwise(widths)]
        return [FRAME_SECONDS * product / sum(products) for product in products]


NETWORKS = (
    Network("10 layers, 16 features, 5 × 5"),
    Network("30 layers", layers=30),
    Network("48 features", features=48),
    Network("15 × 15", kernel=15),
)
COLUMNS = (
    "network", "N", "hop, ticks", "schedule", "slowest", "foreseen", "simulated", "emulated",
    "latency", "N ticks",
)  # fmt: skip


class Case(NamedTuple):
    """One row."""

    network: Network
    num_devices: int
    hop: float
    schedule: str

    @property
    def stages(self) -> list[float]:
        """Seconds of each stage per frame."""
        costs = self.network.costs
        return [sum(costs[first:end]) for first, end in pairwise(balance(costs, self.num_devices))]

    @property
    def hop_seconds(self) -> float:
        """Of a message."""
        return self.hop * FRAME_SECONDS / self.num_devices

    @property
    def beat(self) -> float:
        """Seconds per frame, by the formulas."""
        slowest, n, hops = max(self.stages), self.num_devices, self.hop_seconds
        if self.schedule == "partime":
            return max(slowest, (n * slowest + 2 * (n - 1) * hops) / (2 * n - 1))
        return slowest + 2 * (n - 1) * hops / n

    def run(self, num_frames: int, scale: float) -> Rehearsal:
        """Perform it."""
        schedule = schedules.build(
            self.schedule, num_ranks=self.num_devices, num_microbatches=num_frames
        )
        third = tuple(stage / 3 for stage in self.stages)
        costs = Costs(third, third, third, self.hop_seconds)
        return rehearse(schedule, costs, steps=2, scale=scale)

    def speed_up(self, found: Rehearsal, scale: float) -> float:
        """Emulated frames per second over those of one device."""
        steady = found.steady_seconds
        assert steady is not None  # streams are long enough
        return FRAME_SECONDS * scale / steady.measured

    def row(self, found: Rehearsal, scale: float) -> list[str]:
        """The row's cells."""
        steady = found.steady_seconds
        assert steady is not None
        foreseen = (max(self.stages), self.beat, steady.predicted / scale)
        speeds = [FRAME_SECONDS / seconds for seconds in foreseen]
        speeds.append(self.speed_up(found, scale))
        return [
            self.network.title,
            f"{self.num_devices}",
            f"{self.hop:g}",
            self.schedule,
            *(f"{speed:.2f}" for speed in speeds),
            f"{latency(found) / scale * 1e3:.0f}",
            f"{self.num_devices * self.beat * 1e3:.0f}",
        ]


def latency(found: Rehearsal) -> float:
    """Seconds from the begin of a frame's forward at the first stage until its output, the mean
    over the middle half of the stream."""
    begins, ends = {}, {}
    last = found.measured.num_ranks - 1
    for span in found.measured.spans:
        if span.op.kind is Kind.FORWARD and span.op.stage == 0:
            begins[span.op.microbatch] = span.start
        if span.op.kind is Kind.FORWARD and span.op.stage == last:
            ends[span.op.microbatch] = span.end
    quarter = len(begins) // 4
    return fmean(ends[frame] - begins[frame] for frame in range(quarter, 3 * quarter))


def written(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|---|--:|--:|---|" + "--:|" * (len(heads) - 4), *lines[1:]])


def main() -> None:
    """All cases, a row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", type=int, default=list(range(2, 9)))
    parser.add_argument("--schedules", nargs="+", default=["partime"])
    parser.add_argument("--hops", nargs="+", type=float, default=[0.0, 0.25])
    parser.add_argument("--frames-per-device", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0, help="of all times; 0.1 is quick")
    parser.add_argument("--quick", action="store_true", help="two cases, a tenth of the time")
    parser.add_argument("--picture", type=Path, help="SVG of the speed-ups, a line per network")
    options = parser.parse_args()
    networks, devices, scale = NETWORKS, options.devices, options.scale
    if options.quick:
        networks, devices, scale = NETWORKS[:1], [2, 4], 0.1
    rows = []
    lines: dict[str, list[tuple[float, float]]] = {network.title: [] for network in networks}
    for network in networks:
        for num_devices in devices:
            for hop in options.hops:
                for schedule in options.schedules:
                    case = Case(network, num_devices, hop, schedule)
                    found = case.run(options.frames_per_device * num_devices, scale)
                    rows.append(case.row(found, scale))
                    if (hop, schedule) == (options.hops[0], options.schedules[0]):
                        lines[network.title].append((num_devices, case.speed_up(found, scale)))
                    print(" ".join(rows[-1]), flush=True)
    print(f"\n{written(COLUMNS, rows)}")
    if options.picture:
        drawn = line_chart(list(lines.items()), "devices", "frames per second over one device")
        options.picture.write_text(drawn + "\n", encoding="utf-8")


if __name__ == "__main__":
    publish(main)
