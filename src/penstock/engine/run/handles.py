"""Handles on the optimizers and schedulers of all stages, for what a training loop does with one of
each: read and set learning rates, and step a scheduler that waits for a metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from penstock.base.errors import InputError, RunError
from penstock.base.values import shown
from penstock.engine.model.optimizer_factory import steps_alone
from penstock.engine.run.rank.worker import Worker
from penstock.engine.transport.rendezvous import Rendezvous

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
        optimizers = (one for own in self.by_stage.values() for one in own)
        return [group for optimizer in optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """What the optimizers keep of their parameters."""
        optimizers = (one for own in self.by_stage.values() for one in own)
        return {key: kept for optimizer in optimizers for key, kept in optimizer.state.items()}

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
        return any(not steps_alone(one) for own in self.by_stage.values() for one in own)

    def get_last_lr(self) -> list[float]:
        """The learning rates that they have last set, stage by stage."""
        each = (one for own in self.by_stage.values() for one in own)
        return [float(rate) for one in each for rate in one.get_last_lr()]

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
            told = meeting.exchange(repr(value), str, "to step its schedulers")
            for rank, other in enumerate(told):
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
            for own in self.by_stage.values():
                for one in own:
                    one.step(value)

    def __repr__(self) -> str:
        return f"StageSchedulers({self.by_stage})"


def _by_stage(
    workers: Sequence[Worker], held: Callable[[Worker], Mapping[int, T]]
) -> dict[int, tuple[T, ...]]:
    by_stage: dict[int, tuple[T, ...]] = {}
    for worker in workers:
        for stage, one in held(worker).items():
            by_stage[stage] = (*by_stage.get(stage, ()), one)
    return dict(sorted(by_stage.items()))


def _number(metric: Any) -> float:
    try:
        return float(metric)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"the metric is {shown(metric)}; give one number, as pipeline.evaluate_loss(…) does"
        ) from None
