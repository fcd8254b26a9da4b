"""PARTIME's networks, and how fast this machine learns from frames with them: convolutions that
keep the size of the picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock as pk
from penstock.training.live import Stream

COLOURS = 3
RATE = 1e-3
WARM_UP = 12


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


NETWORKS = (
    Network("10 layers, 16 features, 5 × 5"),
    Network("30 layers", layers=30),
    Network("48 features", features=48),
    Network("15 × 15", kernel=15),
)


def built(network: Network) -> nn.Sequential:
    """The network, with the same weights every time."""
    torch.manual_seed(0)
    widths = [COLOURS, *[network.features] * (network.layers - 1), COLOURS]
    convolutions = (
        nn.Conv2d(before, after, network.kernel, padding=network.kernel // 2)
        for before, after in pairwise(widths)
    )
    return nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in convolutions))


def frames(count: int, pixels: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A few pictures over and over, and what to make of them."""
    generator = torch.Generator().manual_seed(1)
    pairs = torch.rand(8, 2, 1, COLOURS, pixels, pixels, generator=generator)
    return islice(cycle((frame, target) for frame, target in pairs), count)


def frames_at(rate: float, count: int, pixels: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same, each when it is due where so many come in a second."""
    due = time.perf_counter()
    for pair in frames(count, pixels):
        due += 1 / rate
        time.sleep(max(0.0, due - time.perf_counter()))
        yield pair


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Of every stage."""
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

    def __init__(self, network: Network, num_threads: int, pixels: int) -> None:
        self._model, self._pixels = built(network), pixels
        self._optimizer = sgd(self._model.parameters())
        self._num_threads = num_threads

    def run(self, count: int) -> Pace:
        """So many frames."""
        torch.set_num_threads(self._num_threads)

        def work() -> int:
            for frame, target in frames(count, self._pixels):
                self._learn(self._model(frame), target)
            return count

        pace = paced(work)
        torch.set_num_threads(1)
        return pace

    def forward_seconds(self) -> float:
        """Of one frame, the median of thirty."""
        taken = []
        for frame, _ in frames(30, self._pixels):
            begin = time.perf_counter()
            self._model(frame)
            taken.append(time.perf_counter() - begin)
        return median(taken)

    def latency_seconds(self, count: int, rate: float) -> float:
        """From frame to output, the median of frames that come at a rate, and that it learns from:
        a core that has rested or done other things meanwhile takes longer for its forwards."""
        taken = []
        for frame, target in frames_at(rate, count, self._pixels):
            begin = time.perf_counter()
            output = self._model(frame)
            taken.append(time.perf_counter() - begin)
            self._learn(output, target)
        return median(taken)

    def _learn(self, output: Tensor, target: Tensor) -> None:
        mse_loss(output, target).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def profiled(network: Network, pixels: int) -> pk.LayerGraph:
    """Its layers' times with frames of a size."""
    ((frame, target),) = frames(1, pixels)
    return pk.profile(built(network), frame, loss=mse_loss, targets=target)


def opened(
    network: Network,
    graph: pk.LayerGraph,
    pixels: int,
    num_stages: int = 2,
    options: Mapping[str, Any] | None = None,
) -> Stream:
    """A stream through stages as the profile cuts them, which has seen some frames.

    Args:
        options: what else ``pk.stream`` takes.
    """
    cluster = pk.Cluster.local(num_stages)
    plan = pk.plan(graph, cluster, schedule="partime", stages=num_stages, microbatches=1)
    stream = pk.stream(built(network), plan, loss=mse_loss, optimizer=sgd, **options or {})
    for _ in stream.over(frames(WARM_UP, pixels)):
        pass
    return stream


def streamed(stream: Stream, count: int, pixels: int) -> Pace:
    """As fast as it takes frames."""
    return paced(lambda: sum(1 for _ in stream.over(frames(count, pixels))))
