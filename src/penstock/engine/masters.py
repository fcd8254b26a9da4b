"""``master_weights``: optimizers that update weights in half precision through copies in float32.

A step of training in bfloat16 changes most weights by less than their last digit, and is lost. So
weights that compute are in half precision, and their optimizer keeps a *master* of each in float32,
which it updates; the weight is the master, rounded. Micikevicius et al., "Mixed Precision
Training", arXiv 1710.03740. Gradients are computed in half precision, and added up in float32:
over microbatches, and over copies of a stage, whichever reducer sums them.

Decisions:

A master is a part of the optimizer's state. So whoever keeps a shard of that keeps the same shard
of the masters, and checkpoints, spilling and plans treat both alike. That gradients are float32 is
said by the parameter itself (torch's ``grad_dtype``), so that whatever adds to ``.grad``, or makes
room for it, can ask it (``gradient_dtype``). The optimizer's class is derived from the one that it
had, under its name, and hooks of steps see the weights themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.base.errors import InputError
from penstock.base.values import expect

MASTER = "master"
"""The key of a weight's master in the optimizer's state."""

_HALF = (torch.bfloat16, torch.float16)

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def master_weights(make: Callable[[Any], AnyOptimizer]) -> Callable[[Any], AnyOptimizer]:
    """An optimizer factory for models in bfloat16 or float16, with masters in float32.

    The optimizer steps on a float32 master of every weight in half precision, with float32
    gradients and state of its own in float32; then the weight becomes its master, rounded. Other
    weights are updated as ever. A master is made in the first step that has a gradient for it, of
    the weight as it is then, and lies in the optimizer's state as ``"master"``, so it is divided,
    saved and loaded with that.

    With AdamW a weight takes 18 bytes: 2 itself, 4 its gradient, 4 its master and 8 the moments.
    In float16, give the pipeline a ``grad_scaler`` as well.

    Args:
        make: from a stage's parameters to its optimizer.

    Raises:
        InputError: ``make`` is not a function; when the optimizer is made: it is none, has made
            steps or has masters already.
    """
    example = "give a function, as lambda parameters: torch.optim.AdamW(parameters)"
    expect(make, Callable, "make", example)

    def made(parameters: Any) -> AnyOptimizer:
        optimizer = make(parameters)
        expect(optimizer, Optimizer, "what make gave", example)
        kind: Any = type(optimizer)
        if getattr(kind, "keeps_masters", False):
            raise InputError("the optimizer keeps masters already; wrap its factory only once")
        if optimizer.state:
            raise InputError(
                f"{kind.__name__} keeps state already, which is not that of masters; make it anew "
                "where its factory is called"
            )
        optimizer.__class__ = _with_masters(kind)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dtype in _HALF:
                    parameter.grad_dtype = torch.float32
        return optimizer

    return made


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The type of the numbers in which a parameter's gradients are added up."""
    return parameter.grad_dtype or parameter.dtype


def take_gradient_dtype(parameter: Tensor, other: Tensor) -> None:
    """Let what stands for a parameter add up gradients as that does."""
    if other.grad_dtype != parameter.grad_dtype:
        parameter.grad_dtype = other.grad_dtype


@cache
def _with_masters(kind: Any) -> Any:
    """The class of optimizers whose steps are those of ``kind`` on masters."""
    # Without torch's own wrapper, which calls hooks: they see the weights, before and after.
    hooked: Any = kind.step
    on_masters = getattr(hooked, "__wrapped__", hooked)

    @wraps(on_masters)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _on_masters(self):
            return on_masters(self, *args, **kwargs)

    own: Any = Optimizer.profile_hook_step(step)
    own.hooked = True  # or torch wraps it once more
    names = {"step": own, "keeps_masters": True, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), names)


@contextmanager
def _on_masters(optimizer: Optimizer) -> Iterator[None]:
    """Within, the optimizer has masters in the place of the weights that have a gradient."""
    kept, weights = optimizer.state, [group["params"] for group in optimizer.param_groups]
    masters = {
        weight: _master_of(weight, kept.get(weight, {}))
        for own in weights
        for weight in own
        if weight.dtype in _HALF and weight.grad is not None
    }
    optimizer.state = defaultdict(dict)
    for weight, state in kept.items():
        rest = {key: value for key, value in state.items() if key != MASTER}
        if rest:
            optimizer.state[masters.get(weight, weight)] = rest
    for group in optimizer.param_groups:
        group["params"] = [masters.get(weight, weight) for weight in group["params"]]
    try:
        yield
    finally:
        stepped, optimizer.state = optimizer.state, kept
        for group, own in zip(optimizer.param_groups, weights, strict=True):
            group["params"] = own
        with torch.no_grad():
            for weight, master in masters.items():
                kept[weight] = {**stepped.pop(master, {}), MASTER: master.detach()}
                weight.copy_(master)
        kept.update(stepped)  # of what has no master


def _master_of(weight: nn.Parameter, state: dict[str, Any]) -> nn.Parameter:
    if weight.grad is not None and weight.grad.dtype != torch.float32:  # torch copies no grad_dtype
        gradient, weight.grad = weight.grad, None
        weight.grad_dtype = torch.float32
        weight.grad = gradient.float()
    known = state.get(MASTER)
    values = weight.detach().float() if known is None else known
    master = nn.Parameter(values, requires_grad=False)
    # What optimizers may be told by it, such as that it shall not decay.
    vars(master).update(vars(weight))
    master.grad = weight.grad
    return master
