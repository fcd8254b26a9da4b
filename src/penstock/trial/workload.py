"""``Workload``: everything a training script holds, as one value that the command line can take;
and ``Contestant``: one way to train it.

The contestants of a trial, the pipeline and single devices beside it, all start from the same
weights and see the same minibatches. So whatever is trained several times must begin the same each
time, which ``check_repeats`` sees to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.core.graph import LayerGraph
from penstock.core.timing.timeline import Timeline
from penstock.engine.model import microbatches, tree
from penstock.planning.plans import Plan
from penstock.training.estimating import estimate
from penstock.training.estimating.estimating import Arithmetic
from penstock.training.estimating.substitutes import Attention
from penstock.training.pipeline import Pipeline
from penstock.training.profiler import profile
from penstock.training.profiler.alone import Progress
from penstock.training.profiler.disturbance import QUIET_SHARE, Usage, share_of_others
from penstock.training.profiler.profiling import traced_unless_a_chain
from penstock.trial.reference.single_device import SingleDevice

Batch = tuple[Any, Any]
_TRACED_ROWS = 4


@dataclass(frozen=True)
class Workload:
    """A model and everything needed to train it.

    Attributes:
        build_model: makes the model, with the same weights at every call.
        loss: from (output, targets) of a microbatch to a scalar, a mean over rows.
        optimizer: makes an optimizer of parameters.
        batches: makes an iterator of (inputs, targets) minibatches, the same at every call.
        held_out: (inputs, targets) to evaluate on, or ``None``.
        name: shown to people.
        unit: what one element of the targets is, for throughput (``"token"``, ``"image"``).
        notes: shown to people: where the data comes from, and so on.
    """

    build_model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batches: Callable[[], Iterator[Batch]]
    held_out: Batch | None = None
    name: str = "model"
    unit: str = "row"
    notes: str = field(default="")

    def num_units(self) -> int:
        """How many elements the targets of one minibatch have.

        Raises:
            InputError: there is no minibatch.
        """
        _, targets = self.first_batch()
        return sum(tensor.numel() for tensor in tree.tensors(targets))

    def first_batch(self) -> Batch:
        """Make the first minibatch.

        Raises:
            InputError: there is none.
        """
        first = next(self.batches(), None)
        if first is None:
            raise InputError(f"the workload {self.name} yields no minibatch")
        return first

    def profile(
        self,
        num_microbatches: int,
        *,
        repeats: int = 7,
        sizes: Sequence[int] = (),
        ranks: int | None = None,
        patience_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> LayerGraph:
        """Profile the model on the first microbatch of the first minibatch.

        Args:
            num_microbatches: into which the minibatch is cut.
            repeats, ranks, patience_seconds, progress: as ``penstock.profile`` takes them.
            sizes: other microbatch sizes to measure, of at most the rows of the minibatch.

        Raises:
            InputError: there is no minibatch, or it has fewer rows than microbatches or than one of
                the ``sizes``.
        """
        asked, inputs, targets = self._microbatch(num_microbatches, sizes)
        graph = profile(
            self.build_model(),
            inputs,
            loss=self.loss,
            targets=targets,
            optimizer=self.optimizer,
            repeats=repeats,
            sizes=[*sizes, asked],
            ranks=ranks,
            patience_seconds=patience_seconds,
            progress=progress,
        )
        return _of_size(graph, asked)

    def estimate(
        self,
        num_microbatches: int,
        *,
        device: str,
        sizes: Sequence[int] = (),
        software: str = "eager",
        arithmetic: Arithmetic | None = None,
        attention: Attention = "fused",
    ) -> LayerGraph:
        """Estimate the model on the first microbatch of the first minibatch; it is built without
        values where that can be.

        Args:
            num_microbatches, sizes: as of ``profile``.
            device, software, arithmetic, attention: as ``penstock.estimate`` takes them.

        Raises:
            InputError: as ``profile``; or no such device or software.
        """
        asked, inputs, targets = self._microbatch(num_microbatches, sizes)
        try:
            with torch.device("meta"):
                model = self.build_model()
        except Exception:  # it may want values in any way, as of a file
            model = self.build_model()
        if all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            inputs, targets = (
                tree.replace(Tensor, lambda tensor: tensor.to("meta"), part)
                for part in (inputs, targets)
            )
        graph = estimate(
            model,
            inputs,
            device=device,
            loss=self.loss,
            targets=targets,
            optimizer=self.optimizer,
            sizes=[*sizes, asked],
            software=software,
            arithmetic=arithmetic,
            attention=attention,
        )
        return _of_size(graph, asked)

    def _microbatch(self, num_microbatches: int, sizes: Sequence[int]) -> tuple[int, Any, Any]:
        """(rows of a microbatch, inputs, targets) of the largest microbatch that is asked for."""
        if num_microbatches < 1:
            raise InputError(f"the number of microbatches is {num_microbatches}, but must be ≥ 1")
        inputs, targets = self.first_batch()
        rows = microbatches.num_rows(inputs, "inputs")
        if rows < num_microbatches:
            raise InputError(
                f"a minibatch of {rows} rows cannot be cut into {num_microbatches} microbatches; "
                f"ask for at most {rows}"
            )
        if max(sizes, default=0) > rows:
            raise InputError(
                f"sizes: a minibatch of {rows} rows has no microbatch of {max(sizes)}; ask for at "
                f"most {rows}"
            )
        asked = -(-rows // num_microbatches)
        largest = max(asked, *sizes, 1)
        return asked, _first_rows(inputs, largest), _first_rows(targets, largest)

    def build_in_layers(self) -> nn.Module:
        """The model, captured if it names no spine."""
        inputs, _ = self.first_batch()
        return traced_unless_a_chain(self.build_model(), _first_rows(inputs, _TRACED_ROWS))


def _of_size(graph: LayerGraph, asked: int) -> LayerGraph:
    """The graph with microbatches of one size, and the others beside it."""
    others = [graph.at(size) for size in graph.sizes if size != asked]
    return replace(
        graph.at(asked), other_sizes=tuple(replace(other, other_sizes=()) for other in others)
    )


def _first_rows(value: Any, num_rows: int) -> Any:
    return tree.replace(Tensor, lambda tensor: tensor[:num_rows].clone(), value)


def check_repeats(workload: Workload) -> None:
    """Build the model twice and make the first minibatch twice, and compare, to the bit.

    Raises:
        InputError: the second is another one; names ``build_model`` and a weight, or ``batches``.
    """
    first, second = (workload.build_model().state_dict() for _ in range(2))
    other = next((name for name in first if not _same(first[name], second.get(name))), None)
    if other is not None:
        raise InputError(
            f"build_model of the workload {workload.name} gives another {other} when it is called "
            "again, so methods could not begin with the same weights; seed it inside, as with "
            "torch.manual_seed(0)"
        )
    if not _same(workload.first_batch(), workload.first_batch()):
        raise InputError(
            f"batches of the workload {workload.name} gives another first minibatch when it is "
            "called again, so methods could not train on the same data; seed it inside, or give "
            "its data a torch.Generator of its own"
        )


def _same(first: Any, second: Any) -> bool:
    ours, theirs = list(tree.tensors(first)), list(tree.tensors(second))
    return len(ours) == len(theirs) and all(map(_same_bits, ours, theirs))


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    # What is no number does not equal itself.
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


_ENOUGH = 0.5
"""The share of the steps that must be undisturbed, for these to stand for all."""


class StepPace(NamedTuple):
    """How fast somebody trains.

    Attributes:
        seconds: of a step, the median.
        others: the most of the cores' time that other programs had meanwhile, where that disturbed
            so many steps that the time says little; otherwise 0.
    """

    seconds: float
    others: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float], others: Sequence[float]) -> StepPace:
        """By the steps that nobody disturbed, if there are enough of them.

        Args:
            seconds: of each step.
            others: for each step, the share of the cores' time that other programs had meanwhile;
                empty where nobody looked.
        """
        if not others:
            return cls(median(seconds))
        quiet = [step for step, share in zip(seconds, others, strict=True) if share <= QUIET_SHARE]
        if len(quiet) >= _ENOUGH * len(seconds):
            return cls(median(quiet))
        return cls(median(seconds), max(others))


@dataclass
class Contestant:
    """One way to train the workload, and its results so far.

    Attributes:
        name: shown to people.
        workload: what is trained.
        model: a copy of its own, trained in place.
        trainer: trains the model.
        num_threads: torch's intra-op threads while it trains.
        seconds: one entry per step, as in ``losses``.
        held_out: (step, loss) of every evaluation.
        timelines: one entry per step, or per stream of steps, if the trainer records them.
        others: one entry per step: the share of the cores' time that other programs had meanwhile;
            empty where nobody looked.
    """

    name: str
    workload: Workload
    model: nn.Module
    trainer: Pipeline | SingleDevice
    num_threads: int
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def step(self, batch: Batch) -> float:
        """Train on one minibatch; record its loss and its seconds."""
        with intra_op_threads(self.num_threads):
            start = time.perf_counter()
            result = self.trainer.step(*batch)
            assert result is not None  # only a pipeline that was asked to keeps its results
            loss = float(result)
            self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss)
        if isinstance(self.trainer, Pipeline):
            self.timelines.append(self.trainer.timeline)
        return loss

    def stream(self, batches: Sequence[Batch]) -> None:
        """Train on minibatches without a flush between them; each counts as an equal share of the
        time."""
        assert isinstance(self.trainer, Pipeline)
        with intra_op_threads(self.num_threads):
            start = time.perf_counter()
            losses = [float(loss) for loss in self.trainer.steps(batches) if loss is not None]
            seconds = time.perf_counter() - start
        self.losses += losses
        self.seconds += [seconds / len(losses)] * len(losses)
        self.timelines.append(self.trainer.timeline)

    @contextmanager
    def taking_turn(self) -> Iterator[None]:
        """Around some steps: note what other programs had of the machine meanwhile."""
        before = Usage.now()
        yield
        share = share_of_others(before, Usage.now())
        self.others += [share] * (len(self.seconds) - len(self.others))

    @property
    def pace(self) -> StepPace:
        """How fast it is."""
        return StepPace.of(self.seconds, self.others)

    @property
    def flushes(self) -> bool:
        """Whether it trains one minibatch after the other."""
        if isinstance(self.trainer, Pipeline):
            return not self.trainer.plan.versions.asynchronous
        return True

    def take_turn(self, batches: Sequence[Batch]) -> None:
        """Train on minibatches; one that never flushes drains at the end of the turn."""
        with self.taking_turn():
            if self.flushes:
                for batch in batches:
                    self.step(batch)
            else:
                self.stream(batches)

    def held_out_loss(self) -> float | None:
        """The loss on held-out data, after the steps so far; ``None`` without any."""
        if self.workload.held_out is None:
            return None
        inputs, targets = self.workload.held_out
        with intra_op_threads(self.num_threads):
            value = float(self.workload.loss(self.trainer.evaluate(inputs), targets))
        self.held_out.append((len(self.losses), value))
        return value

    def close(self) -> None:
        """End the trainer's workers, if it has any."""
        if isinstance(self.trainer, Pipeline):
            bring_back(self.trainer, self.model)
            self.trainer.close()


def bring_back(pipeline: Pipeline, model: nn.Module) -> None:
    """Give a model the weights that have left it, where stages come and go: it is compared."""
    if pipeline.plan.spill is not None:
        model.load_state_dict(pipeline.state_dict(), assign=True)


def pipelined(workload: Workload, plan: Plan) -> Contestant:
    """A contestant that trains the workload as the plan spreads it, in threads."""
    model = workload.build_model()
    trainer = Pipeline(
        model, plan, loss=workload.loss, optimizer=workload.optimizer, transport="threads", seed=0
    )
    return Contestant("pipeline", workload, model, trainer, plan.num_threads)


def on_one_device(workload: Workload, num_microbatches: int, num_threads: int) -> Contestant:
    """A contestant that trains the workload on one device, accumulating over microbatches."""
    model = workload.build_in_layers()
    trainer = SingleDevice(model, num_microbatches, workload.loss, workload.optimizer, seed=0)
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    size = "" if num_microbatches > 1 else ", whole batch at once"
    name = f"one device, {threads}{size}"
    return Contestant(name, workload, model, trainer, num_threads)


@contextmanager
def intra_op_threads(num_threads: int) -> Iterator[None]:
    """Let torch use so many threads inside an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
