"""What splitting a backward costs: Penstock's stages beside torch's own split.

    python -m benchmarks.contest.split_backward [--rounds 40]

One thread; the ways take turns within one run (A B C A B C …), medians over rounds. Columns:

I, W, I + W    milliseconds of the two halves, and of both
÷ B            I + W over the full backward of the same row's model by plain autograd
kept           bytes alive after the forward, beside parameters, gradients and the output
between        the same between I and W, beside the input's gradient
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.alone import publish
from penstock.demo.gpt import Block
from penstock.engine.device.memory import keep_freed_pages
from penstock.engine.model import tree
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.stage.stage import Keep, Stage


class Work(NamedTuple):
    """A layer and the shape of its input and output."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]


def conv_block() -> nn.Module:
    parts = [[nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()] for _ in range(2)]
    return nn.Sequential(*parts[0], *parts[1])


WORKS = (
    Work("GPT block, width 320, 2 × 48 tokens", lambda: Block(320, 5, 0.0), (2, 48, 320)),
    Work("GPT block, width 64, 2 × 16 tokens", lambda: Block(64, 2, 0.0), (2, 16, 64)),
    Work("conv block, 64 channels, 2 × 32 × 32", conv_block, (2, 64, 32, 32)),
)


class Way:
    """One way to compute gradients: a forward, and then one or two parts of a backward."""

    def __init__(self, name: str, work: Work) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = work.build()
        self.inputs = torch.randn(work.shape)
        self.seed = torch.randn(work.shape)

    def forward(self) -> None:
        raise NotImplementedError

    def parts(self) -> list[Callable[[], object]]:
        raise NotImplementedError


class Plain(Way):
    def forward(self) -> None:
        self._leaf = self.inputs.detach().requires_grad_()
        self._output = self.model(self._leaf)

    def parts(self) -> list[Callable[[], object]]:
        def full() -> None:
            self._output.backward(self.seed)
            del self._output, self._leaf

        return [full]


class TorchSplit(Way):
    def forward(self) -> None:
        self._leaf = self.inputs.detach().requires_grad_()
        self._output = self.model(self._leaf)

    def parts(self) -> list[Callable[[], object]]:
        def first() -> None:
            _, self._groups = stage_backward_input(
                [self._output], [self.seed], [self._leaf], self.model.parameters()
            )
            del self._output, self._leaf

        def second() -> None:
            stage_backward_weight(self.model.parameters(), self._groups)
            del self._groups

        return [first, second]


class Ours(Way):
    def __init__(self, name: str, work: Work) -> None:
        super().__init__(name, work)
        layers = spine_of(nn.Sequential(self.model))
        self._stage = Stage(1, layers, 1, LayerStreams(0))

    def forward(self) -> None:
        self._stage.forward(0, self.inputs, keep=Keep.SPLIT)

    def parts(self) -> list[Callable[[], object]]:
        return [
            lambda: self._stage.backward_input(0, [self.seed]),
            lambda: self._stage.backward_weight(0),
        ]


class Storages(TorchDispatchMode):
    """Remembers every memory that an operation returned, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tree.tensors(result):
            storage = tensor.untyped_storage()
            ref = StorageWeakRef(storage)
            self._seen[ref.cdata] = (ref, storage.nbytes())
        return result

    def alive_bytes(self, beside: list[Tensor]) -> int:
        gc.collect()
        known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in beside}
        return sum(
            num_bytes
            for cdata, (ref, num_bytes) in self._seen.items()
            if cdata not in known and not ref.expired()
        )


def held_bytes(way: Way) -> tuple[int, int]:
    """(after the forward, after the first part of the backward)."""
    way.model.zero_grad(set_to_none=True)
    with Storages() as storages:
        way.forward()
        fixed = [*way.model.parameters(), *way.model.buffers(), way.seed]
        kept = storages.alive_bytes(fixed)
        parts = way.parts()
        parts[0]()
        gradients = [p.grad for p in way.model.parameters() if p.grad is not None]
        between = storages.alive_bytes([*fixed, *gradients])
        for part in parts[1:]:
            part()
    return kept, between


def seconds(way: Way) -> list[float]:
    """Of each part of one backward."""
    way.forward()
    times = []
    for part in way.parts():
        start = time.perf_counter()
        part()
        times.append(time.perf_counter() - start)
    return times


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(work: Work, rounds: int) -> list[str]:
    """Lines of the table: every way on one model."""
    ways = [Plain("full backward", work), TorchSplit("torch", work), Ours("Penstock", work)]
    times: list[list[list[float]]] = [[] for _ in ways]
    for index in range(rounds + 3):
        for way, found in zip(ways, times, strict=True):
            measured = seconds(way)
            if index >= 3:  # the first rounds warm up
                found.append(measured)
    check_equal(ways[0], ways[2])
    # The median of sums, so that a disturbed half spoils one round only.
    full = statistics.median(part[0] for part in times[0])
    lines = []
    for way, found in zip(ways, times, strict=True):
        halves = [statistics.median(part) * 1e3 for part in zip(*found, strict=True)]
        total = statistics.median(sum(part) for part in found)
        kept, between = held_bytes(way)
        split = len(halves) == 2
        cells = [
            work.name,
            way.name,
            f"{halves[0]:.2f}" if split else "",
            f"{halves[1]:.2f}" if split else "",
            f"{total * 1e3:.2f}",
            f"{total / full:.2f}",
            f"{kept / 1024:,.0f} KiB",
            f"{between / 1024:,.0f} KiB" if split else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def check_equal(plain: Way, ours: Way) -> None:
    for expected, found in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    keep_freed_pages()
    print("| model | way | I ms | W ms | I + W ms | ÷ B | kept | between |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    with one_thread():
        for work in WORKS:
            for line in measure(work, rounds):
                print(line, flush=True)


if __name__ == "__main__":
    publish(main)
