"""Is a profile true? The sum of its layers beside real training, and its stages beside real ones.

    python -m benchmarks.predicting.profiler [--works gpt resnet mlp lstm] [--rounds 10]
        [--repeats 3]

One thread. Profile and real steps take turns (A B A B …). A step is 8 microbatches, forward and
backward, on one device with no cut at all, by plain autograd; medians. ``--cpu-time`` counts the
thread's CPU time instead of the time that passes, for a machine that is busy with other things.
Columns of the first table:

rows             of a microbatch; the smaller ones are the profile's other sizes
layers F, B      milliseconds of one microbatch, summed over the profile's layers
step F, B        the same in the real step
ratio            layers over step, of F + B
update           the profile's sum over the optimizer's real step, milliseconds of both
profiling        seconds that the profile took

The second table compares what a profile says of the two halves of the model with what ops of these
take as stages in this thread (F, I and W of a split backward, R), and in a pipeline of two ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import penstock as pk
from benchmarks.common.alone import publish
from penstock.demo import GPT
from penstock.demo import loss as next_token
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.stage.stage import Keep, Stage

MICROBATCHES = 8


class Work(NamedTuple):
    """A model and one microbatch of its training."""

    build_model: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Any, Any], Tensor]


class Bottleneck(nn.Module):
    """A residual block: 1×1, 3×3 and 1×1 convolutions beside a shortcut."""

    def __init__(self, before: int, inside: int, after: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(before, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU(inplace=True),
            nn.Conv2d(inside, inside, 3, stride, 1, bias=False), nn.BatchNorm2d(inside),
            nn.ReLU(inplace=True),
            nn.Conv2d(inside, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.shortcut = nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, value: Tensor) -> Tensor:
        return self.relu(self.branch(value) + self.shortcut(value))


def resnet() -> nn.Module:
    widths = [
        (32, 16, 64, 1), (64, 16, 64, 1), (64, 32, 128, 2), (128, 32, 128, 1),
        (128, 64, 256, 2), (256, 64, 256, 1), (256, 128, 512, 2), (512, 128, 512, 1),
    ]  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
        *(Bottleneck(*one) for one in widths),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    pairs = [(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*(one for pair in pairs for one in pair), nn.Linear(512, 10))


class Recurrent(nn.Module):
    """One LSTM layer: its outputs, without its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        return self.lstm(value)[0]


def lstm() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, 256), *(Recurrent(256) for _ in range(4)), nn.Linear(256, 256)
    )


def work_of(name: str) -> Work:
    generator = torch.Generator().manual_seed(0)
    tokens = partial(torch.randint, 0, 256, generator=generator)
    if name == "gpt":
        return Work(GPT, tokens((4, 48)), tokens((4, 48)), next_token)
    if name == "lstm":
        return Work(lstm, tokens((8, 32)), tokens((8, 32)), next_token)
    digits = torch.randint(0, 10, (32,), generator=generator)
    if name == "resnet":
        images = torch.randn(8, 3, 32, 32, generator=generator)
        return Work(resnet, images, digits[:8], nn.functional.cross_entropy)
    return Work(mlp, torch.randn(32, 512, generator=generator), digits, nn.functional.cross_entropy)


WORKS = ("gpt", "resnet", "mlp", "lstm")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


class Unsplit:
    """Real training steps on one device."""

    def __init__(self, work: Work, rows: int) -> None:
        torch.manual_seed(0)
        self._model = work.build_model()
        self._work = work._replace(inputs=work.inputs[:rows], targets=work.targets[:rows])
        self._optimizer = adam(self._model.parameters())
        self.times: list[tuple[float, float, float]] = []

    def step(self) -> None:
        forward = backward = 0.0
        self._optimizer.zero_grad()
        for _ in range(MICROBATCHES):
            start = time.perf_counter()
            loss = self._work.loss(self._model(self._work.inputs), self._work.targets)
            middle = time.perf_counter()
            loss.backward()
            forward += middle - start
            backward += time.perf_counter() - middle
        start = time.perf_counter()
        self._optimizer.step()
        update = time.perf_counter() - start
        self.times.append((forward / MICROBATCHES, backward / MICROBATCHES, update))

    def medians(self) -> list[float]:
        return [statistics.median(column) for column in zip(*self.times, strict=True)]


def profiled(work: Work, sizes: list[int], repeats: int) -> pk.LayerGraph:
    torch.manual_seed(0)
    return pk.profile(
        work.build_model(), work.inputs, loss=work.loss, targets=work.targets, optimizer=adam,
        repeats=repeats, sizes=sizes, ranks=0,
    )  # fmt: skip


def sums(name: str, rounds: int, repeats: int) -> list[list[str]]:
    """Rows of the first table: the work at several sizes."""
    work = work_of(name)
    sizes = [len(work.inputs) >> shift for shift in (0, 1, 2)]
    real = {size: Unsplit(work, size) for size in sizes}
    graphs, seconds = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        graphs.append(profiled(work, sizes, repeats))
        seconds.append(time.perf_counter() - start)
        for one in real.values():
            for _ in range(3):
                one.step()
    rows = []
    for size, one in real.items():
        one.times = one.times[3:]
        found = [graph.at(size).layers for graph in graphs]
        forward, backward, update = (
            statistics.median(sum(getattr(one, field) for one in layers) for layers in found)
            for field in ("forward_seconds", "backward_seconds", "update_seconds")
        )
        real_forward, real_backward, real_update = one.medians()
        rows.append([
            name, str(size),
            *(f"{1e3 * one:.2f}" for one in (forward, backward, real_forward, real_backward)),
            f"{(forward + backward) / (real_forward + real_backward):.3f}",
            f"{1e3 * update:.2f} / {1e3 * real_update:.2f}",
            f"{statistics.median(seconds):.1f}",
        ])  # fmt: skip
    return rows


class Halves:
    """The two halves of a model as stages, run by hand in this thread."""

    def __init__(self, work: Work, cut: int) -> None:
        torch.manual_seed(0)
        layers = spine_of(work.build_model())
        self._stages = [
            Stage(0, layers[:cut], 0, LayerStreams(0)),
            Stage(1, layers[cut:], cut, LayerStreams(0)),
        ]
        self._work = work
        self.times: dict[tuple[int, str], list[float]] = {}

    def _timed(self, stage: int, kind: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = run()
        self.times.setdefault((stage, kind), []).append(time.perf_counter() - start)
        return found

    def once(self, keep: Keep) -> None:
        value, criterion = self._work.inputs, None
        kind = {Keep.EVERYTHING: "F", Keep.SPLIT: "F split", Keep.INPUT: "F thin"}[keep]
        for index, stage in enumerate(self._stages):
            if index:
                criterion = lambda output: self._work.loss(output, self._work.targets)  # noqa: E731
            run = partial(stage.forward, 0, value, 0, criterion, keep)
            value = self._timed(index, kind, run).value
        gradients: Any = [torch.ones(())]
        for index, stage in reversed([*enumerate(self._stages)]):
            if keep is Keep.INPUT:
                self._timed(index, "R", partial(stage.recompute, 0))
            if keep is Keep.SPLIT:
                run = partial(stage.backward_input, 0, gradients)
                gradients = self._timed(index, "I", run).inputs
                self._timed(index, "W", partial(stage.backward_weight, 0))
            else:
                kind = "B" if keep is Keep.EVERYTHING else "B again"
                run = partial(stage.backward, 0, gradients)
                gradients = self._timed(index, kind, run).inputs

    def median(self, stage: int, kind: str) -> float:
        return statistics.median(self.times[stage, kind][3:])


def halves(name: str, rounds: int, repeats: int) -> list[list[str]]:
    """Rows of the second table."""
    work = work_of(name)
    cut = len(profiled(work, [], 1).layers) // 2
    real = Halves(work, cut)
    graphs = []
    for _ in range(rounds):
        graphs.append(profiled(work, [], repeats))
        for _ in range(5):
            for keep in Keep:
                real.once(keep)
    rows = []
    for stage in (0, 1):
        parts = [graph.layers[:cut] if stage == 0 else graph.layers[cut:] for graph in graphs]
        op = statistics.median(graph.op_seconds for graph in graphs)

        def said(*fields: str, parts: list[Any] = parts, op: float = op) -> float:
            return op + statistics.median(
                sum(getattr(layer, field) for layer in part for field in fields) for part in parts
            )

        pairs = {
            "F": (said("forward_seconds"), real.median(stage, "F")),
            "B": (said("backward_seconds"), real.median(stage, "B")),
            "I": (said("backward_input_seconds"), real.median(stage, "I")),
            "F + I + W": (
                2 * op
                + said(
                    "forward_seconds", "split_forward_seconds", "backward_seconds", "split_seconds"
                ),
                sum(real.median(stage, kind) for kind in ("F split", "I", "W")),
            ),
            "R": (said("recompute_seconds"), real.median(stage, "R")),
        }
        cells = [f"{a * 1e3:.2f} / {b * 1e3:.2f} = {a / b:.2f}" for a, b in pairs.values()]
        rows.append([name, str(stage), *cells, f"{op * 1e6:.0f}"])
    return rows


def show(title: str, columns: tuple[str, ...], rows: list[list[str]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    if options.cpu_time:
        time.perf_counter = time.thread_time
    torch.set_num_threads(1)
    show(
        "The sum over layers and an unsplit training step",
        ("model", "rows", "layers F ms", "layers B ms", "step F ms", "step B ms", "ratio",
         "update ms", "profiling s"),
        [row for name in options.works for row in sums(name, options.rounds, options.repeats)],
    )  # fmt: skip
    show(
        "Profile / stages run by hand, milliseconds",
        ("model", "stage", "F", "B", "I", "F + I + W", "R", "op µs"),
        [row for name in options.works for row in halves(name, options.rounds, options.repeats)],
    )


if __name__ == "__main__":
    publish(main)
