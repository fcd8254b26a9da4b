"""Functions of parameters, as users give them, that make optimizers and their schedulers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from penstock.base.errors import InputError
from penstock.base.values import expect


class Parameters(list[nn.Parameter]):
    """The parameters of one stage, as the optimizer factory gets them.

    Args:
        named: (the name in the whole model, parameter) of each.
        stage: the number of the stage.
        num_stages: how many stages the pipeline has.
        delay: how many updates old the stage's gradients are when they are applied; 0 in a
            synchronous pipeline.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        stage: int = 0,
        num_stages: int = 1,
        delay: float = 0.0,
    ) -> None:
        super().__init__(parameter for _, parameter in named)
        self._named = tuple(named)
        self.stage = stage
        self.num_stages = num_stages
        self.delay = delay

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the whole model, parameter) of each, to make parameter groups by name."""
        return iter(self._named)


OptimizerFactory = Callable[[Parameters], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def make_optimizer(
    make: OptimizerFactory, parameters: Parameters, whose: str
) -> torch.optim.Optimizer:
    """Make the optimizer of some parameters.

    Args:
        whose: owner of the parameters, for errors, as "stage 1".

    Raises:
        InputError: the function raises, gives no optimizer, one that calls the loss several times
            per step, or one of parameters that are not among these.
    """
    try:
        made = make(parameters)
    except Exception as error:
        raise InputError(
            f"the optimizer of {whose} cannot be made: {type(error).__name__}: {error}"
        ) from error
    remedy = "it must return one, as lambda parameters: torch.optim.AdamW(parameters) does"
    expect(made, torch.optim.Optimizer, "what the optimizer function made", remedy)
    if not steps_alone(made):
        raise InputError(
            f"{type(made).__name__} calls the loss several times per step (it needs a closure), "
            "which a pipeline cannot do; take another optimizer"
        )
    given = set(map(id, parameters))
    used = [parameter for group in made.param_groups for parameter in group["params"]]
    if any(id(parameter) not in given for parameter in used):
        raise InputError(
            f"the optimizer of {whose} has parameters that its function was not given: make it of "
            "the function's argument, as lambda parameters: torch.optim.AdamW(parameters), and not "
            "of the model's own parameters"
        )
    return made


def make_scheduler(
    make: SchedulerFactory, optimizer: torch.optim.Optimizer, whose: str, *, takes_metric: bool
) -> torch.optim.lr_scheduler.LRScheduler:
    """Make the learning-rate scheduler of an optimizer.

    Args:
        whose: owner of the optimizer, for errors, as "stage 1".
        takes_metric: whether anybody may give it the metric that it waits for.

    Raises:
        InputError: the function raises, or gives nothing that can step.
    """
    try:
        made = make(optimizer)
    except Exception as error:
        raise InputError(
            f"the lr_scheduler of {whose} cannot be made: {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(made, "step", None)):
        raise InputError(
            f"what the lr_scheduler function made is of type {type(made).__name__}; it must return "
            "a scheduler, as lambda optimizer: StepLR(optimizer, 10) does"
        )
    if not steps_alone(made) and not takes_metric:
        raise InputError(
            f"{type(made).__name__} waits for a metric, which nobody gives it in a live stream; "
            "take a scheduler that steps with each update"
        )
    return made


def steps_alone(made: Any) -> bool:
    """Whether ``step()`` of an optimizer or scheduler takes no argument that must be given."""
    try:
        inspect.signature(made.step).bind()
    except TypeError:
        return False
    except ValueError:  # a function without a signature: nobody knows
        return True
    return True
