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
from collections.abc import Callable, Iterator
from itertools import cycle, islice, pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.streaming.speed_up import NETWORKS, Network
from penstock.training.live import Stream

SIZE = 32
RATE = 1e-3
WARM_UP = 12


def built(network: Network) -> nn.Sequential:
    """Convolutions that keep the size of the picture."""
    torch.manual_seed(0)
    widths = [3, *[network.features] * (network.layers - 1), 3]
    convolutions = (
        nn.Conv2d(before, after, network.kernel, padding=network.kernel // 2)
        for before, after in pairwise(widths)
    )
    layers = (nn.Sequential(convolution, nn.ReLU()) for convolution in convolutions)
    return nn.Sequential(*layers)


def frames(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A few pictures over and over."""
    generator = torch.Generator().manual_seed(1)
    pairs = [
        (
            torch.rand(1, 3, SIZE, SIZE, generator=generator),
            torch.rand(1, 3, SIZE, SIZE, generator=generator),
        )
        for _ in range(8)
    ]
    return islice(cycle(pairs), count)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


class Pace(NamedTuple):
    """Seconds per frame: of a clock, and of processors."""

    wall: float
    processor: float


def paced(work: Callable[[], int]) -> Pace:
    """Of something that goes through so many frames."""
    wall, processor = time.perf_counter(), time.process_time()
    count = work()
    return Pace((time.perf_counter() - wall) / count, (time.process_time() - processor) / count)


class OneDevice:
    """Learns from one frame after the other."""

    def __init__(self, network: Network, num_threads: int) -> None:
        self._model = built(network)
        self._optimizer = sgd(self._model.parameters())
        self._num_threads = num_threads

    def run(self, count: int) -> Pace:
        torch.set_num_threads(self._num_threads)

        def work() -> int:
            for frame, target in frames(count):
                mse_loss(self._model(frame), target).backward()
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
            return count

        pace = paced(work)
        torch.set_num_threads(1)
        return pace

    def forward_seconds(self) -> float:
        """Of one frame, the median of thirty."""
        taken = []
        for frame, _ in frames(30):
            begin = time.perf_counter()
            self._model(frame)
            taken.append(time.perf_counter() - begin)
        return median(taken)


def planned(network: Network, num_stages: int) -> tuple[nn.Sequential, pk.Plan]:
    """The model, cut where the profile says."""
    model = built(network)
    ((frame, target),) = frames(1)
    graph = pk.profile(model, frame, loss=mse_loss, targets=target)
    cluster = pk.Cluster.local(num_stages)
    plan = pk.plan(graph, cluster, schedule="partime", stages=num_stages, microbatches=1)
    return model, plan


def opened(network: Network, num_stages: int = 2, *, replay: bool = False) -> Stream:
    """A stream that has seen some frames."""
    model, plan = planned(network, num_stages)
    stream = pk.stream(model, plan, loss=mse_loss, optimizer=sgd, replay=replay)
    for _ in stream.over(frames(WARM_UP)):
        pass
    return stream


def streamed(stream: Stream, count: int) -> Pace:
    """As fast as it takes frames."""
    return paced(lambda: sum(1 for _ in stream.over(frames(count))))


def rates(turns: int, count: int) -> None:
    """Print the table of rates."""
    columns = ("1 thread", "2 threads", "2 stages", "replayed")
    print(f"{'':32}{''.join(f'{name:>12}' for name in columns)}{'speed-up':>10}{'overhead':>17}")
    for network in NETWORKS:
        alone, threaded = OneDevice(network, 1), OneDevice(network, 2)
        taken: dict[str, list[Pace]] = {"alone": [], "threaded": [], "stages": [], "replayed": []}
        with opened(network) as stream, opened(network, replay=True) as replayed:
            for runner in (alone, threaded):
                runner.run(WARM_UP)
            for _ in range(turns):
                taken["alone"].append(alone.run(count))
                taken["threaded"].append(threaded.run(count))
                taken["stages"].append(streamed(stream, count))
                taken["replayed"].append(streamed(replayed, count))
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
    alone = OneDevice(network, 1)
    alone.run(WARM_UP)
    forward, capacity = alone.forward_seconds(), 1 / alone.run(count).wall
    with opened(network) as stream:
        light = [r.latency_seconds for r in stream.over(frames(count), rate=0.3 * capacity)]
        fastest = 1 / streamed(stream, 4 * count).wall
        camera = 2 * fastest
        begin = time.perf_counter()
        late = [
            result.latency_seconds
            for result in stream.over(frames(8 * count), rate=camera, when_late="drop-oldest")
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
