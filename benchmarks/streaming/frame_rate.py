"""What two cores of this machine really learn from a stream: rates, latency, drops, overhead.

    python -m benchmarks.streaming.frame_rate [--turns 5] [--frames 60] [--quick]

The lecture's four networks, with pictures of 32 × 32 instead of 64 × 64. In turns, in one process:

1 thread     one device: forward, backward, update, one after the other
2 threads    the same with two intra-op threads: what else two cores could do
by hand      partime on two threads, written for this network, cut where the plan cuts
2 stages     ``pk.stream`` with partime on two ranks of one thread each, as fast as it takes frames
replayed     the same with ``replay=True``
overhead     processor time per frame and stage above that of one device, in µs: of the three
             before. Two cores that work at the same time share caches, by hand as well.

Then, of the first network: the latency of single frames beside the sum of the forwards, and what
``when_late="drop-oldest"`` makes of a camera that is twice too fast. Run it alone on a machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch

from benchmarks.common.alone import publish
from benchmarks.streaming.by_hand import TwoThreads
from benchmarks.streaming.convolutions import (
    NETWORKS,
    WARM_UP,
    OneDevice,
    Pace,
    frames,
    opened,
    profiled,
    streamed,
)

SIZE = 32


def rates(turns: int, count: int) -> None:
    """Print the table of rates."""
    columns = ("1 thread", "2 threads", "by hand", "2 stages", "replayed")
    print(f"{'':32}{''.join(f'{name:>12}' for name in columns)}{'speed-up':>10}{'overhead':>26}")
    for network in NETWORKS:
        graph = profiled(network, SIZE)
        alone, threaded = OneDevice(network, 1, SIZE), OneDevice(network, 2, SIZE)
        with (
            opened(network, graph, SIZE) as stream,
            opened(network, graph, SIZE, options={"replay": True}) as replayed,
            TwoThreads(network, len(stream.plan.stages[0].layers), SIZE) as by_hand,
        ):
            runs: dict[str, Callable[[int], Pace]] = {
                "1 thread": alone.run,
                "2 threads": threaded.run,
                "by hand": by_hand.run,
                "2 stages": partial(streamed, stream, pixels=SIZE),
                "replayed": partial(streamed, replayed, pixels=SIZE),
            }
            for runner in (alone, threaded, by_hand):
                runner.run(WARM_UP)
            taken = [{name: run(count) for name, run in runs.items()} for _ in range(turns)]
        cells = "".join(
            f"{1 / median(paces[name].wall for paces in taken):>8.1f} fps" for name in columns
        )
        speed_up = median(paces["1 thread"].wall / paces["2 stages"].wall for paces in taken)
        overhead = " / ".join(
            f"{1e6 * median(_overhead(paces, name) for paces in taken):.0f}"
            for name in ("by hand", "2 stages", "replayed")
        )
        print(f"{network.title:32}{cells}{speed_up:>10.2f}{overhead:>23} µs", flush=True)


def _overhead(paces: Mapping[str, Pace], name: str) -> float:
    return (paces[name].processor - paces["1 thread"].processor) / 2


def latency(count: int) -> None:
    """Print what single frames take, and what becomes of frames that come too fast."""
    network = NETWORKS[0]
    alone = OneDevice(network, 1, SIZE)
    alone.run(WARM_UP)
    forward, capacity = alone.forward_seconds(), 1 / alone.run(count).wall
    rate = 0.3 * capacity
    rested = alone.latency_seconds(count, rate)
    with opened(network, profiled(network, SIZE), SIZE) as stream:
        with TwoThreads(network, len(stream.plan.stages[0].layers), SIZE) as by_hand:
            by_hand.run(WARM_UP)
            least = by_hand.latency_seconds(count, rate)
        light = [r.latency_seconds for r in stream.over(frames(count, SIZE), rate=rate)]
        fastest = 1 / streamed(stream, 4 * count, SIZE).wall
        camera = 2 * fastest
        begin = time.perf_counter()
        late = [
            result.latency_seconds
            for result in stream.over(frames(8 * count, SIZE), rate=camera, when_late="drop-oldest")
        ]
        kept = len(late) / (time.perf_counter() - begin)
    print(
        f"\nlight load: {median(light) * 1e3:.2f} ms from frame to output, "
        f"{median(light) / rested:.2f} × the forwards of one device at the same rate "
        f"({rested * 1e3:.2f} ms; {forward * 1e3:.2f} ms one after the other); "
        f"by hand {least * 1e3:.2f} ms"
    )
    print(
        f"a camera of {camera:.0f} frames/s, twice what two stages take: {kept:.1f} frames/s "
        f"({kept / fastest:.3f} of what they take), latency {median(late) * 1e3:.1f} ms, "
        f"at most {max(late) * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--frames", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    given = parser.parse_args()
    if given.quick:
        given.turns, given.frames = 1, 6
    torch.set_num_threads(1)
    rates(given.turns, given.frames)
    latency(given.frames)


if __name__ == "__main__":
    publish(main)
