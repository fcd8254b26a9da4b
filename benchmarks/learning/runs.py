"""Trains one method once, and keeps account of what was trained already."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock as pk
from benchmarks.learning.methods import BY_NAME, Method, plan_of
from benchmarks.learning.works import Work

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
"""The learning rates that every method tries."""
WARM_UP = 20
"""Over how many updates every method's learning rate rises."""
INITIAL_SEEDS = 1000

LayOut = Callable[[Method, int, int, nn.Module], pk.Plan]
"""Of a method, with so many stages, for so many updates of a model."""


@dataclass(frozen=True)
class Setting:
    """What identifies a run.

    Attributes:
        work: its name.
        method: its name.
        num_stages: p.
        rate: learning rate after the warm-up.
        seed: of weights and minibatches.
        updates: how many.
        every: how many updates from one look at the held-out loss to the next.
    """

    work: str
    method: str
    num_stages: int
    rate: float
    seed: int
    updates: int
    every: int


@dataclass(frozen=True)
class Run:
    """What came out.

    Attributes:
        setting: what was run.
        held_out: loss at update 0, ``every``, 2·``every``, …; infinite from where a loss was not
            finite.
        correct: part of held-out targets that are the most likely class, at the end.
        seconds: it took.
    """

    setting: Setting
    held_out: tuple[float, ...]
    correct: float
    seconds: float

    @property
    def last(self) -> float:
        """The mean held-out loss of the last three looks, as single ones jump."""
        return sum(self.held_out[-3:]) / 3


class Book:
    """Runs by setting, in a folder.

    Every run is appended to ``results.jsonl`` when it is done, so that a measurement can be broken
    off and taken up again; ``finish`` gathers all of them in ``results.json``.
    """

    def __init__(self, folder: Path) -> None:
        self._whole, self._lines = folder / "results.json", folder / "results.jsonl"
        self._runs: dict[Setting, Run] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if self._whole.exists():
            for one in json.loads(self._whole.read_text()):
                self._take(one)
        if self._lines.exists():
            for line in self._lines.read_text().splitlines():
                self._take(json.loads(line))

    def _take(self, found: dict[str, Any]) -> None:
        setting = Setting(**found.pop("setting"))
        losses = tuple(math.inf if one is None else one for one in found.pop("held_out"))
        self._runs[setting] = Run(setting, losses, **found)

    def run(self, setting: Setting, train: Callable[[Setting], Run]) -> Run:
        """The run of a setting, trained now if it was not before."""
        if setting not in self._runs:
            found = self._runs[setting] = train(setting)
            with self._lines.open("a") as file:
                file.write(_line(found) + "\n")
        return self._runs[setting]

    def finish(self) -> None:
        """Write all runs into one file, sorted, one per line."""
        ordered = sorted(self._runs.values(), key=lambda run: astuple(run.setting))
        self._whole.write_text("[\n" + ",\n".join(map(_line, ordered)) + "\n]\n")
        self._lines.unlink(missing_ok=True)


def _line(run: Run) -> str:
    losses = [round(one, 5) if math.isfinite(one) else None for one in run.held_out]
    numbers = {"correct": round(run.correct, 5), "seconds": round(run.seconds, 2)}
    return json.dumps({"setting": asdict(run.setting), "held_out": losses, **numbers})


class Snapshots:
    """Copies of each stage's weights after every so many of its own updates.

    A stream is not interrupted to look at the held-out loss: that would drain the pipeline, and
    gradients would be younger than they are in training. The stages' copies after update k, made at
    different times, are the model after update k.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.taken: dict[int, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what an optimizer updates."""
        count = 0

        def after(updated: torch.optim.Optimizer, *_: Any) -> None:
            nonlocal count
            count += 1
            if count % self._every == 0:
                weights = [one for group in updated.param_groups for one in group["params"]]
                # One append per stage: lists bear several threads.
                self.taken[count].extend([(one, one.detach().clone()) for one in weights])

        optimizer.register_step_post_hook(after)


def train(work: Work, setting: Setting, lay_out: LayOut = plan_of) -> Run:
    """Train once through a pipeline of threads, by default of the method's own plan."""
    method = BY_NAME[setting.method]
    model = work.build(INITIAL_SEEDS + setting.seed)
    plan = lay_out(method, setting.num_stages, setting.updates, model)
    snapshots = Snapshots(setting.every)
    held_out = [_held_out(work, model)[0]]

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = method.optimizer(parameters, setting.rate)
        snapshots.watch(made)
        return made

    started = time.perf_counter()
    try:
        with pk.Pipeline(
            model,
            plan,
            loss=work.loss,
            optimizer=optimizer,
            lr_scheduler=lambda one: torch.optim.lr_scheduler.LambdaLR(
                one, lambda update: min(1.0, (update + 1) / WARM_UP)
            ),
            transport="threads",
            seed=setting.seed,
            record=False,
        ) as pipeline:
            for _ in pipeline.steps(work.batches(setting.updates, setting.seed)):
                pass
    except pk.errors.StageError:  # a loss was not finite
        pass
    correct = 0.0
    for update in range(setting.every, setting.updates + 1, setting.every):
        taken = snapshots.taken[update]
        if len(taken) < len(list(model.parameters())):
            held_out.append(math.inf)
            continue
        with torch.no_grad():
            for parameter, value in taken:
                parameter.copy_(value)
        loss, correct = _held_out(work, model)
        held_out.append(loss)
    return Run(setting, tuple(held_out), correct, time.perf_counter() - started)


def _held_out(work: Work, model: nn.Module) -> tuple[float, float]:
    inputs, targets = work.held_out
    with torch.no_grad():
        outputs = model.eval()(inputs)
    model.train()
    loss = float(work.loss(outputs, targets))
    correct = float((outputs.argmax(-1) == targets).float().mean())
    return (loss if math.isfinite(loss) else math.inf), correct
