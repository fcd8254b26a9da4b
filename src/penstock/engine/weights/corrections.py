"""Corrections of delay, and other tensors in the place of a model's parameters during a pass.

PipeMare has slower steps, and weights as they were (Yang et al., MLSys 2021); weights are predicted
by the direction of an optimizer's next steps.

Where ``Leaves`` stand in the place of parameters, nothing is copied: the dictionaries in which
modules keep their parameters are changed and restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError, ModelError
from penstock.core.versions import PipeMare, Place
from penstock.engine.masters import take_gradient_dtype

Leaves = list[nn.Parameter]
"""One for each trained parameter."""


class _Socket(NamedTuple):
    """Where a module holds a parameter."""

    holder: dict[str, nn.Parameter | None]
    name: str
    number: int


class Sockets:
    """Where the trained parameters of some modules are held.

    Args:
        modules: each once.

    Attributes:
        live: the trained parameters, each once.

    Raises:
        ModelError: a parameter is of a class of its own, or has hooks, which leaves would not have.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self.find()

    def find(self) -> None:
        """Look again at what is trained: layers may be frozen and freed."""
        self.live: Leaves = []
        self._names: list[str] = []
        self._places: list[_Socket] = []
        numbers: dict[int, int] = {}
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue  # what never changes has one version
                _check(parameter, f"{type(module).__name__}.{name}")
                if id(parameter) not in numbers:
                    numbers[id(parameter)] = len(self.live)
                    self.live.append(parameter)
                    self._names.append(f"{type(module).__name__}.{name}")
                self._places.append(_Socket(module._parameters, name, numbers[id(parameter)]))

    def leaves(self) -> Leaves:
        """Parameters of their own with the memory that the live ones have now. Each has a version
        counter of its own, so that autograd does not mind what becomes of the live one."""
        leaves = [nn.Parameter(live.data) for live in self.live]
        for leaf, live in zip(leaves, self.live, strict=True):
            take_gradient_dtype(leaf, live)
        return leaves

    @contextmanager
    def holding(self, leaves: Leaves | None) -> Iterator[None]:
        """Modules compute with the leaves; with the live parameters if there are none."""
        if leaves is None:
            yield
            return
        for holder, name, number in self._places:
            holder[name] = leaves[number]
        try:
            yield
        finally:
            for holder, name, number in self._places:
                holder[name] = self.live[number]
        for leaf, name in zip(leaves, self._names, strict=True):
            if leaf._version:
                raise ModelError(
                    f"a forward has written into {name}, of which there are several versions; do "
                    "it between streams, or choose a synchronous schedule"
                )

    @contextmanager
    def gathering(self, leaves: Leaves | None) -> Iterator[None]:
        """Add what is added to the gradients of leaves to those of the live parameters."""
        if leaves is None:
            yield
            return
        for live, leaf in zip(self.live, leaves, strict=True):
            leaf.grad, live.grad = live.grad, None
        bypassed = None
        try:
            yield
        finally:
            for live, leaf, name in zip(self.live, leaves, self._names, strict=True):
                bypassed = name if live.grad is not None else bypassed
                live.grad, leaf.grad = leaf.grad, None
        if bypassed is not None:
            raise ModelError(
                f"a layer computes with {bypassed} through a reference of its own, so that it does "
                "not see the version that it should; read it as an attribute of its module, or "
                "choose a synchronous schedule"
            )


def _check(parameter: nn.Parameter, name: str) -> None:
    """Raise ``ModelError`` where leaves could not stand for a parameter."""
    if type(parameter) is not nn.Parameter:
        raise ModelError(
            f"{name} is a {type(parameter).__name__}; only plain parameters can have versions, so "
            "choose a synchronous schedule"
        )
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ModelError(
            f"{name} has hooks, which would not see the gradients of its versions; remove them, or "
            "choose a synchronous schedule"
        )


class LoweredRates:
    """T1: learning rates of a stage are lower at first, the more so the older its gradients are.

    They are lowered around the optimizer's step alone, so that schedulers do not see it.

    Args:
        policy: whose ``t1`` is given.
        place: the stage's.
        optimizer: the stage's.
        is_synchronous: whether the step at hand is one with a flush, whose rate stays.

    Attributes:
        num_updates: how many had a lowered rate.
    """

    def __init__(
        self,
        policy: PipeMare,
        place: Place,
        optimizer: torch.optim.Optimizer,
        is_synchronous: Callable[[], bool],
    ) -> None:
        self._policy = policy
        self._place = place
        self._is_synchronous = is_synchronous
        self.num_updates = 0
        self._rates: list[Any] = []
        optimizer.register_step_pre_hook(self._lower)
        optimizer.register_step_post_hook(self._restore)

    def _lower(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if self._is_synchronous():
            return
        factor = self._policy.rate_factor(self._place, self.num_updates)
        self.num_updates += 1
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def _restore(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


class Drift:
    """T2: how weights move per update, by which backwards reckon what their forwards read.

    Args:
        tau: by how many updates a backward is behind its forward; above 0.
        decay: the share of the drift that is left after ``tau`` updates.

    Attributes:
        of_parameter: the drift of each parameter.
    """

    def __init__(self, tau: float, decay: float) -> None:
        self._tau = tau
        self._decay = decay ** (1 / tau)
        self.of_parameter: dict[nn.Parameter, Tensor] = {}
        self._live: Leaves = []

    @classmethod
    def of(cls, policy: object, place: Place) -> Drift | None:
        """The drift that a policy follows at a stage, if it does."""
        if isinstance(policy, PipeMare) and policy.t2 is not None and policy.tau(place) > 0:
            return cls(policy.tau(place), policy.t2)
        return None

    def begin(self, live: Leaves) -> None:
        """A new stream, which trains these parameters; what is known of their drift stays."""
        for parameter in live:
            self.of_parameter.setdefault(parameter, torch.zeros_like(parameter))
        self._live = live

    def before(self, parameter: nn.Parameter) -> Tensor:
        """A parameter as it was ``tau`` updates ago, by its drift."""
        return parameter.detach().sub(self.of_parameter[parameter], alpha=self._tau)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around an update: δ ← γδ + (1−γ)(w_{t+1} − w_t)."""
        pairs = [(self.of_parameter[live], live) for live in self._live]
        with torch.no_grad():
            for drift, live in pairs:
                drift.mul_(self._decay).sub_(live, alpha=1 - self._decay)
            yield
            for drift, live in pairs:
                drift.add_(live, alpha=1 - self._decay)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        drifts = (self.of_parameter[live] for live in self._live)
        return sum(drift.untyped_storage().nbytes() for drift in drifts)


_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def check_predictable(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``InputError`` unless the steps of an optimizer can be foreseen."""
    if not isinstance(optimizer, (torch.optim.SGD, *_ADAM)):
        raise InputError(
            f"prediction knows the steps of SGD, Adam and AdamW, but not of "
            f"{type(optimizer).__name__}; take one of these, or another policy of penstock.versions"
        )
    if any(group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups):
        raise InputError("prediction does not know amsgrad or maximize; leave them out")


def predicted(optimizer: torch.optim.Optimizer, steps: int) -> dict[nn.Parameter, Tensor]:
    """Weights as they will be some steps later: w − steps·lr·direction.

    The direction is the momentum of SGD; of Adam, m̂/(√v̂+ε), and with AdamW its weight decay.

    Args:
        optimizer: one that ``check_predictable`` accepts.
        steps: how many updates ahead.

    Returns:
        New tensors, by parameter; a parameter that has not been updated yet is its own prediction.
    """
    foreseen = {}
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                direction = _direction(optimizer, group, parameter)
                if steps and direction is not None:
                    distance = steps * float(group["lr"])
                    change = (distance * direction).to(parameter.dtype)
                    foreseen[parameter] = parameter.detach() - change
                else:
                    foreseen[parameter] = parameter.detach()
    return foreseen


def _direction(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> Tensor | None:
    state = optimizer.state.get(parameter, {})
    if isinstance(optimizer, torch.optim.SGD):
        momentum: Tensor | None = state.get("momentum_buffer")
        return momentum
    if "exp_avg" not in state:
        return None
    count, (beta1, beta2) = float(state["step"]), group["betas"]
    mean = state["exp_avg"] / (1 - beta1**count)
    square = state["exp_avg_sq"] / (1 - beta2**count)
    direction: Tensor = mean / (square.sqrt() + group["eps"])
    decays = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    if decays and group["weight_decay"]:
        direction = direction + group["weight_decay"] * parameter.detach()
    return direction
