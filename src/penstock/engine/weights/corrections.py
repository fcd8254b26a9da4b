"""What delay is corrected by: PipeMare's slower steps and weights as they were (Yang et al., MLSys
2021), and the direction of an optimizer's next steps, by which weights are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.core.versions import PipeMare, Place
from penstock.engine.weights.leaves import Leaves


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
                    foreseen[parameter] = parameter.detach() - distance * direction
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
