"""What two cores of this machine really learn from a stream: rates, latency, drops, overhead.

    python -m benchmarks.streaming.frame_rate [--turns 5] [--frames 60] [--quick]

The lecture's four networks, with pictures of 32 × 32 instead of 64 × 64. In turns, in one process:

1 thread     one device: forward, backward, update, one after the other
2 threads    the same with two intra-op threads: what else two cores could do
2 stages     ``pk.stream`` with partime on two ranks of one thread each, as fast as it takes frames
replayed     the same with ``replay=True``
overhead     processor time of the two ranks per frame and stage above that of one device, in µs:
             of the two before

Then, of the first network: the latency of single frames beside the sum of the forwards, and what
``when_late="drop-oldest"`` makes of a camera that is twice too fast. Run it alone on a machine.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from benchmarks.common.alone import publish
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
    columns = ("1 thread", "2 threads", "2 stages", "replayed")
    print(f"{'':32}{''.join(f'{name:>12}' for name in columns)}{'speed-up':>10}{'overhead':>17}")
    for network in NETWORKS:
        graph = profiled(network, SIZE)
        alone, threaded = OneDevice(network, 1, SIZE), OneDevice(network, 2, SIZE)
        taken: dict[str, list[Pace]] = {"alone": [], "threaded": [], "stages": [], "replayed": []}
        with (
            opened(network, graph, SIZE) as stream,
            opened(network, graph, SIZE, options={"replay": True}) as replayed,
        ):
            for runner in (alone, threaded):
                runner.run(WARM_UP)
            for _ in range(turns):
                taken["alone"].append(alone.run(count))
                taken["threaded"].append(threaded.run(count))
                taken["stages"].append(streamed(stream, count, SIZE))
                taken["replayed"].append(streamed(replayed, count, SIZE))
        wall = {name: median(pace.wall for pace in paces) for name, paces in taken.items()}
        speed_up = median(
            a.wall / b.wall for a, b in zip(taken["alone"], taken["stages"], strict=True)
        )
        overheads = [
            median(
                (b.processor - a.processor) / 2
                for a, b in zip(taken["alone"], taken[name], strict=True)
            )
            for name in ("stages", "replayed")
        ]
        overhead = " / ".join(f"{seconds * 1e6:.0f}" for seconds in overheads)
        cells = "".join(f"{1 / wall[name]:>8.1f} fps" for name in wall)
        print(f"{network.title:32}{cells}{speed_up:>10.2f}{overhead:>14} µs", flush=True)


def latency(count: int) -> None:
    """Print what single frames take, and what becomes of frames that come too fast."""
    network = NETWORKS[0]
    alone = OneDevice(network, 1, SIZE)
    alone.run(WARM_UP)
    forward, capacity = alone.forward_seconds(), 1 / alone.run(count).wall
    with opened(network, profiled(network, SIZE), SIZE) as stream:
        light = [r.latency_seconds for r in stream.over(frames(count, SIZE), rate=0.3 * capacity)]
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
        f"{median(light) / forward:.2f} × the forwards of one device ({forward * 1e3:.2f} ms)"
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
