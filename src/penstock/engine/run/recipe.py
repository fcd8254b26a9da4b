"""How outputs and gradients are used: the part of training that is not the model's spread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from penstock.base.errors import InputError
from penstock.base.values import expect, flag, number, one_of, shown
from penstock.core.versions import Flush, Policy, Updates
from penstock.engine.model.microbatches import Weighting
from penstock.engine.model.optimizer_factory import OptimizerFactory, SchedulerFactory

BatchNormStatistics = Literal["microbatch", "minibatch"]
Loss = Callable[[Any, Any], Tensor]
Metric = Callable[[Any, Any], Tensor | float]


_EXAMPLES = {
    "loss": "torch.nn.functional.cross_entropy",
    "optimizer": "lambda parameters: torch.optim.AdamW(parameters)",
    "lr_scheduler": "lambda optimizer: LinearLR(optimizer)",
}


def check_loss(loss: Any) -> None:
    """Raise ``InputError`` for what is no loss of (outputs, targets), as far as one can see that
    without calling it."""
    if loss is None:
        return
    expect(loss, Callable, "loss", f"give a function, as in loss={_EXAMPLES['loss']}")
    if isinstance(loss, type):
        raise InputError(
            f"loss is the class {loss.__name__}; make one of it, as in loss={loss.__name__}()"
        )
    of_torch = type(loss).__module__ == "torch.nn.modules.loss"  # of others, nobody knows
    if of_torch and loss.reduction == "none":
        raise InputError(
            f'{type(loss).__name__} has reduction="none", so its loss is no number; take '
            'reduction="mean", or "sum" with Pipeline(…, reduction="sum")'
        )


def check_factory(name: str, make: Any) -> None:
    """Raise ``InputError`` for what is no function that makes optimizers, or schedulers.

    Args:
        name: ``"optimizer"`` or ``"lr_scheduler"``.
    """
    example = f"{name}={_EXAMPLES[name]}"
    if isinstance(make, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        raise InputError(
            f"{name} is made already ({type(make).__name__}), and each stage makes its own; give "
            f"the function that does, as in {example}"
        )
    if make is not None:
        expect(make, Callable, name, f"give a function, as in {example}")


@dataclass(frozen=True)
class LossScale:
    """The state of ``torch.amp.GradScaler`` as a value, with its rule.

    Every rank follows the rule for itself, from the same verdicts.
    """

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int

    @classmethod
    def of(cls, scaler: torch.amp.GradScaler) -> LossScale | None:
        """The state of a scaler; ``None`` if the scaler is not enabled.

        Raises:
            InputError: it is no ``torch.amp.GradScaler``.
        """
        expect(scaler, torch.amp.GradScaler, "grad_scaler", "give a torch.amp.GradScaler")
        state = scaler.state_dict()
        return cls.of_state(state) if state else None

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> LossScale:
        """From ``torch.amp.GradScaler.state_dict``, whatever kind of number a file has."""
        own = {key.lstrip("_"): value for key, value in state.items()}
        counts = {key: int(own.pop(key)) for key in ("growth_interval", "growth_tracker")}
        return cls(**own, **counts)

    def store(self, scaler: torch.amp.GradScaler) -> None:
        """Give a scaler this state."""
        keys = scaler.state_dict()
        scaler.load_state_dict({key: getattr(self, key.lstrip("_")) for key in keys})

    @property
    def inverse(self) -> float:
        """The factor on gradients before they are used; rounded as torch rounds it."""
        return float(torch.tensor(self.scale).double().reciprocal().float())

    def after(self, finite: bool) -> LossScale:
        """The scale after a step whose gradients were or were not finite."""
        if not finite:
            return replace(self, scale=_times(self.scale, self.backoff_factor), growth_tracker=0)
        tracker = self.growth_tracker + 1
        if tracker < self.growth_interval:
            return replace(self, growth_tracker=tracker)
        grown = _times(self.scale, self.growth_factor)
        unbounded = grown == float("inf")
        return replace(self, scale=self.scale if unbounded else grown, growth_tracker=0)


def _times(scale: float, factor: float) -> float:
    # Multiplied in double precision and kept in single, as torch does it.
    return float(torch.tensor(scale * factor, dtype=torch.float32))


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        loss: from (output, targets) of a microbatch to a scalar, or ``None`` if never trained.
        optimizer: makes the optimizer of a stage; without one, gradients only accumulate.
        lr_scheduler: makes the scheduler of an optimizer; stepped after each update.
        clip_norm: the most that the global norm of the gradients may be.
        clip_stage_norm: the most that the norm of one stage's gradients may be.
        loss_scale: what the loss is multiplied by so that small gradients survive.
        post_validate: update before the global norm is known, and undo it if that was wrong.
        metrics: by name, from (output, targets) of a microbatch to a number.
        stop_at_nan: raise when the loss of a microbatch is not finite.
        count_memory: count what each rank keeps for backwards.
        versions: which weights passes read.
        weighting: how much each microbatch counts.
        batch_norm: whether running statistics follow each microbatch or each minibatch.
        live: minibatches are frames of a live stream, of which not all have targets.
    """

    loss: Loss | None = None
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerFactory | None = None
    clip_norm: float | None = None
    clip_stage_norm: float | None = None
    loss_scale: LossScale | None = None
    post_validate: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    stop_at_nan: bool = True
    batch_norm: BatchNormStatistics = "microbatch"
    count_memory: bool = False
    versions: Policy = field(default_factory=Flush)
    weighting: Weighting = field(default_factory=Weighting)
    live: bool = False

    @property
    def skips_without_gradient(self) -> bool:
        """Whether a stage makes no update where nothing has come back: nobody has said what a frame
        should have given, or a stream begins or ends."""
        return self.live or self.versions.activations == "newest"

    @property
    def stays_finite(self) -> bool:
        """Whether stages look at what they make before weights learn from it: not every frame of a
        stream has a loss that tells, and where gradients go through the newest activations, these
        are of a microbatch whose loss is not known yet."""
        return self.stop_at_nan and self.skips_without_gradient

    @property
    def settings(self) -> dict[str, str]:
        """Arguments that must be alike on all ranks, as text by their names. Of functions it is
        whether there is one: they may be made on every rank for itself."""
        plain = (
            "clip_norm", "clip_stage_norm", "post_validate", "stop_at_nan", "batch_norm",
            "count_memory", "versions",
        )  # fmt: skip
        given = {
            "loss": self.loss,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "grad_scaler": self.loss_scale,
        }
        return {
            **{name: repr(getattr(self, name)) for name in plain},
            **{name: "None" if value is None else "given" for name, value in given.items()},
            "metrics": repr(sorted(self.metrics)),
            "reduction": self.weighting.reduction,
        }

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_factory("optimizer", self.optimizer)
        check_factory("lr_scheduler", self.lr_scheduler)
        one_of("batch_norm", self.batch_norm, get_args(BatchNormStatistics))
        for name in ("clip_norm", "clip_stage_norm"):
            limit = getattr(self, name)
            if limit is not None:
                number(name, limit, positive=True)
        self._check_observing()
        if self.optimizer is None:
            for name in ("lr_scheduler", "clip_norm", "clip_stage_norm", "loss_scale"):
                if getattr(self, name) is not None:
                    raise InputError(f"{name} needs an optimizer; give optimizer=… as well")
        if self.versions.asynchronous:
            self._check_asynchronous()
        if self.post_validate and not self.needs_agreement:
            raise InputError(
                "post_validate is for updates that depend on all ranks: give clip_norm or a "
                "grad_scaler too, or leave it out; other updates wait for nobody anyway"
            )

    def _check_observing(self) -> None:
        for name in ("post_validate", "stop_at_nan", "count_memory"):
            flag(name, getattr(self, name))
        example = "give functions by name, as in metrics={'correct': count_correct}"
        expect(self.metrics, Mapping, "metrics", example)
        for name, metric in self.metrics.items():
            expect(name, str, f"metrics: the name {shown(name)}", example)
            expect(metric, Callable, f"metrics: {shown(name)}", example)

    def _check_asynchronous(self) -> None:
        # What needs all stages' gradients of one update is not to be had without a flush.
        refusals = {
            "clip_norm": "clip_stage_norm clips each stage by itself",
            "loss_scale": "use bfloat16, which needs no GradScaler",
            "post_validate": "it is for updates that depend on all ranks; leave it out",
        }
        for name, remedy in refusals.items():
            if getattr(self, name):
                argument = "a grad_scaler" if name == "loss_scale" else name
                raise InputError(
                    f"{argument} needs the gradients of all stages at one update, which a pipeline "
                    f"that never flushes does not have; {remedy}"
                )
        if self.batch_norm == "minibatch":
            raise InputError(
                "batch_norm='minibatch' needs a flush after each minibatch; without one, running "
                "statistics follow every microbatch: leave it out"
            )
        if self.loss is not None and self.optimizer is None:
            raise InputError("without a flush there are no gradients to keep: give optimizer=…")

    @property
    def updates(self) -> Updates:
        """Whether an update is made of a microbatch or of a minibatch."""
        return self.versions.updates

    @property
    def averages(self) -> bool:
        """Whether the loss is a mean, so that gradients of replicas are averaged where each
        microbatch is an update."""
        return self.weighting.reduction == "mean"

    @property
    def needs_agreement(self) -> bool:
        """Whether an update depends on the gradients of all ranks."""
        return self.clip_norm is not None or self.loss_scale is not None
