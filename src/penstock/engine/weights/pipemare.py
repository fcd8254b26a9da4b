"""PipeMare (Yang et al., MLSys 2021): slower steps at first, and weights as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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
