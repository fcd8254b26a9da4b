"""Objects that a training loop holds beside the pipeline and uses as on one device: optimizers and
schedulers of all stages as one, the loss of a step, and a data set of which a process loads its
own rows only.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from penstock.base.errors import InputError, RunError
from penstock.base.values import shown
from penstock.core.schedule import Kind
from penstock.engine.model.optimizer_factory import steps_alone
from penstock.engine.run.assembly import Assembly
from penstock.engine.run.rank.worker import Worker
from penstock.engine.run.recipe import Recipe
from penstock.engine.transport.rendezvous import Rendezvous


class Rows(Protocol):
    """A data set whose rows have numbers."""

    def __getitem__(self, index: Any) -> Any:
        """The row with a number."""

    def __len__(self) -> int:
        """How many there are."""


class OwnRows(Dataset[Any]):
    """The rows of a data set that this process's stages compute with, among stand-ins.

    All processes are asked for the same minibatches, in the same order. Only the first stage takes
    inputs and only the last one targets, and of a stage with replicas each takes its microbatches.
    Of other rows nothing counts but that they are there, so a row that was loaded stands for them.

    Args:
        rows: the data set.
        microbatches: those of a minibatch that the process takes something of; ``None`` for all.
        num_microbatches: of a minibatch with enough rows.
    """

    def __init__(
        self, rows: Rows, microbatches: Sequence[int] | None, num_microbatches: int
    ) -> None:
        self._rows = rows
        self._microbatches = microbatches
        self._num_microbatches = num_microbatches

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """The rows of a minibatch, for ``DataLoader``."""
        wanted = self.wanted(len(indices)) or range(min(1, len(indices)))
        loaded = {place: self._rows[indices[place]] for place in wanted}
        return [loaded.get(place, loaded[wanted[0]]) for place in range(len(indices))]

    def wanted(self, num_rows: int) -> Sequence[int]:
        """Which rows of a minibatch the process computes with, by their places in it."""
        count = self._num_microbatches
        # With fewer rows there are fewer microbatches, on other ranks than these.
        if self._microbatches is None or num_rows < count:
            return range(num_rows)
        whole, more = divmod(num_rows, count)
        starts = [number * whole + min(number, more) for number in range(count + 1)]
        return [
            row
            for number in self._microbatches
            for row in range(starts[number], starts[number + 1])
        ]


def own_rows(parts: Assembly, recipe: Recipe, rows: Rows) -> OwnRows:
    """The data set for the processes of a pipeline.

    Raises:
        InputError: it has no rows with numbers, or processes need rows that they do not compute
            with.
    """
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise InputError(
            "own_rows takes a data set whose rows have numbers, with __getitem__ and __len__; one "
            "that can only be read on must be read by every process"
        )
    count = parts.plan.num_microbatches
    # Without a flush, which replica a microbatch is for depends on those before it.
    if not parts.in_processes or parts.plan.versions.asynchronous:
        return OwnRows(rows, None, count)
    if parts.cutter.compares:
        raise InputError(
            "processes compare the minibatches that they are given, and own_rows makes them "
            "differ; give Pipeline(…, compare_data=False)"
        )
    if recipe.weighting.weight is not None:
        raise InputError(
            "weight=… counts the targets of all rows on every process, and own_rows leaves rows "
            "out; load all of them, or leave weight out"
        )
    return OwnRows(rows, _microbatches_here(parts), count)


def _microbatches_here(parts: Assembly) -> list[int]:
    """Those that this process takes inputs or targets of, if a minibatch has enough rows."""
    schedule, ends = parts.plan.build_schedule(), (0, len(parts.plan.stages) - 1)
    (worker,) = parts.workers
    if worker.rank >= len(schedule.ranks):  # a parameter server
        return []
    ops = schedule.ranks[worker.rank]
    return sorted({op.microbatch for op in ops if op.kind is Kind.FORWARD and op.stage in ends})


class StepLoss(Tensor):
    """A scalar that is as any other, but says what to do to whoever wants to go backward from it.

    Copies and pickles of it are plain tensors, and so is what is computed from it, except for what
    ``loss / 4`` and ``scaler.scale(loss)`` make, from which people go backward, too.
    """

    # What is computed from it is a plain tensor, at the speed of one.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, loss: Tensor | None) -> StepLoss | None:
        """A loss with the sentence; ``None`` stays ``None``."""
        return None if loss is None else loss.detach().as_subclass(cls)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to go backward.

        Raises:
            InputError: always; it says where gradients are made.
        """
        raise InputError(
            "loss.backward() has nothing to do: pipeline.step(…) has gone backward already, and "
            "updated the weights if the pipeline has an optimizer. Leave out loss.backward(), "
            "optimizer.step() and optimizer.zero_grad(); to accumulate gradients over n calls, "
            "write pipeline.step(…, update=False, share=1/n)"
        )

    def __mul__(self, other: Any) -> Any:
        return _still(super().__mul__(other))

    def __rmul__(self, other: Any) -> Any:
        return _still(super().__rmul__(other))

    def __truediv__(self, other: Any) -> Any:
        return _still(super().__truediv__(other))

    def _plainly(self) -> Tensor:
        return self.as_subclass(Tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plainly())

    def __format__(self, format_spec: str) -> str:
        return format(self._plainly(), format_spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plainly().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self._plainly(), memo)


def _still(value: Any) -> Any:
    """A loss times a number is a loss; with a gradient of its own, it may go backward."""
    if not isinstance(value, Tensor) or value.requires_grad or value.dim():
        return value
    return value.as_subclass(StepLoss)


T = TypeVar("T")


class StageOptimizers(torch.optim.Optimizer):
    """The optimizers of this process's stages as one: ``ReduceLROnPlateau(pipeline.optimizers)``
    and whoever else reads and sets the options of groups works with it.

    It makes no updates: ``Pipeline.step`` does. Under ``torchrun`` every process has its own
    stages', so all must do the same with them.

    Args:
        workers: this process's.
        at_rest: returns when nothing is under way that would still read the options, or raises.
    """

    # Optimizer's own constructor wants parameters, keeps groups of its own, and would miss those
    # that come with a checkpoint.
    def __init__(self, workers: Sequence[Worker], at_rest: Callable[[], None]) -> None:
        self._workers = workers
        self._at_rest = at_rest
        self.defaults = {}

    @property
    def by_stage(self) -> dict[int, tuple[torch.optim.Optimizer, ...]]:
        """The optimizers of each stage that has parameters: one for each copy of it that this
        process has, and each tensor rank."""
        return _by_stage(self._workers, lambda worker: worker.updater.optimizers)

    @property
    def learning_rates(self) -> list[float]:
        """Those of all groups, as ``param_groups`` has them; may be read at any time."""
        return [float(group["lr"]) for group in self._groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, stage by stage; what is set in them holds from the next
        step on. A stage whose gradients are averaged over copies, or old, has learning rates
        multiplied accordingly.

        Raises:
            InputError: in a loop over ``steps()``, where the next minibatch is under way already.
        """
        self._at_rest()
        return self._groups

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in _each(self.by_stage) for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The state that optimizers keep, by parameter."""
        states = (optimizer.state for optimizer in _each(self.by_stage))
        return {key: kept for state in states for key, kept in state.items()}

    def __getitem__(self, number: object) -> NoReturn:
        """Refuse: it is one optimizer.

        Raises:
            InputError: always.
        """
        raise InputError(
            "optimizers is one optimizer for all stages, not a list; take "
            "optimizers.by_stage[stage][0] for that of one stage, optimizers.param_groups for the "
            "groups of all"
        )

    def step(self, closure: Any = None) -> NoReturn:
        """Refuse: updates belong to steps of the pipeline.

        Raises:
            InputError: always.
        """
        raise InputError("pipeline.step(…) updates the weights itself; leave out optimizers.step()")

    def zero_grad(self, set_to_none: bool = True) -> NoReturn:
        """Refuse: updates clear gradients.

        Raises:
            InputError: always.
        """
        raise InputError(
            "pipeline.step(…) clears the gradients that it has updated with; leave out "
            "optimizers.zero_grad()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refuse: which parameters a stage trains, its optimizer factory says.

        Raises:
            InputError: always.
        """
        raise InputError(
            "groups are made where the pipeline is built, by the function that optimizer=… gets; "
            "it is given the parameters of one stage with their names"
        )

    def state_dict(self) -> NoReturn:
        """Refuse: checkpoints hold the state of optimizers.

        Raises:
            InputError: always.
        """
        raise InputError("pipeline.save(folder) writes what optimizers keep, and load brings it")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Refuse: checkpoints hold the state of optimizers.

        Raises:
            InputError: always.
        """
        self.state_dict()

    def __repr__(self) -> str:
        return f"StageOptimizers({self.by_stage})"


class StageSchedulers:
    """The schedulers of this process's stages as one.

    Args:
        workers: this process's.
        alone: the context in which nothing else of the pipeline runs, and all updates are made.
        meet: a meeting of all processes; ``None`` where there is one only.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        alone: Callable[[], AbstractContextManager[None]],
        meet: Callable[[], Rendezvous | None],
    ) -> None:
        self._workers = workers
        self._alone = alone
        self._meet = meet

    @property
    def by_stage(self) -> dict[int, tuple[Any, ...]]:
        """The scheduler of each optimizer of ``Pipeline.optimizers``; empty without any."""
        return _by_stage(self._workers, lambda worker: worker.updater.schedulers)

    @property
    def wait_for_metric(self) -> bool:
        """Whether they wait for a metric, as ``ReduceLROnPlateau``, rather than for updates."""
        return not all(map(steps_alone, _each(self.by_stage)))

    def get_last_lr(self) -> list[float]:
        """The learning rates that they have last set, stage by stage."""
        return [float(rate) for own in _each(self.by_stage) for rate in own.get_last_lr()]

    def step(self, metric: float | Tensor) -> None:
        """Give every stage's scheduler the metric that it waits for. All processes must call it,
        between steps, with the same metric: that of ``Pipeline.evaluate_loss``, say.

        Raises:
            InputError: the schedulers wait for no metric, or it is no number.
            RunError: another process gave another one.
            PeerError, DeadlineError: another process did not call it.
        """
        value = _number(metric)
        meeting = self._meet()
        if meeting is not None:
            metrics = meeting.exchange(repr(value), str, "to step its schedulers")
            for rank, other in enumerate(metrics):
                if other != repr(value):
                    raise RunError(
                        f"rank {meeting.rank} steps its schedulers with {value!r}, but rank {rank} "
                        f"with {other}, so stages would learn at different rates; give every rank "
                        "the same metric, such as that of pipeline.evaluate_loss(…)"
                    )
        elif not self.by_stage:
            raise InputError("there is no scheduler to step: give Pipeline(…, lr_scheduler=…)")
        if self.by_stage and not self.wait_for_metric:
            raise InputError(
                "these schedulers are stepped after every update by themselves; leave out "
                "schedulers.step(…)"
            )
        with self._alone():
            for scheduler in _each(self.by_stage):
                scheduler.step(value)

    def __repr__(self) -> str:
        return f"StageSchedulers({self.by_stage})"


def _by_stage(
    workers: Sequence[Worker], held: Callable[[Worker], Mapping[int, T]]
) -> dict[int, tuple[T, ...]]:
    by_stage: dict[int, tuple[T, ...]] = {}
    for worker in workers:
        for stage, own in held(worker).items():
            by_stage[stage] = (*by_stage.get(stage, ()), own)
    return dict(sorted(by_stage.items()))


def _each(by_stage: Mapping[int, tuple[T, ...]]) -> Iterator[T]:
    return itertools.chain.from_iterable(by_stage.values())


def _number(metric: Any) -> float:
    try:
        return float(metric)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"the metric is {shown(metric)}; give one number, as pipeline.evaluate_loss(…) does"
        ) from None
