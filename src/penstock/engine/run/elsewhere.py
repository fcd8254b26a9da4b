"""Weights that another process trains: reading them here gives what they were before.

Under torchrun each process has the whole model and trains its own stages of it. The rest stays as
it was built or loaded, and nothing about it looks wrong; so reading it warns. So it does where a
process trains parts of weights, whose whole values are nowhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Self

from torch import nn

_ABOVE_STATE_DICT = 4
_ABOVE_CALL = 6


class Elsewhere:
    """Watches a model of which this process trains a part.

    Its methods are hooks of the model; they are copied and pickled with it.

    Args:
        own: the stages that this process trains.
        num_stages: how many the pipeline has.
        in_parts: whether it trains parts of their weights.

    Attributes:
        stale: whether other processes have trained weights since this one knew them all.
    """

    def __init__(self, own: list[int], num_stages: int, in_parts: bool = False) -> None:
        self._own = own
        self._num_stages = num_stages
        self._in_parts = in_parts
        self.stale = False

    @classmethod
    def watching(
        cls, model: nn.Module, own: Iterable[int], num_stages: int, *, in_parts: bool = False
    ) -> Self:
        """An ``Elsewhere`` that watches a model, if this process does not train all of it."""
        elsewhere = cls(sorted(own), num_stages, in_parts)
        if len(elsewhere._own) < num_stages or in_parts:
            for module in (model, getattr(model, "original", None)):  # a captured one has two names
                if isinstance(module, nn.Module):
                    elsewhere.watch(module)
        return elsewhere

    def watch(self, model: nn.Module) -> None:
        """Warn when the model's weights are read: by ``state_dict`` or by calling it."""
        # torch does not annotate all of these.
        hooked: Any = model
        hooked.register_state_dict_pre_hook(self._before_state_dict)
        hooked.register_forward_pre_hook(self._before_forward)
        hooked.register_load_state_dict_post_hook(self._after_load)

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._warn("state_dict() of the model", _ABOVE_STATE_DICT)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._warn("calling the model", _ABOVE_CALL)

    def _after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.stale = self.stale and bool(incompatible_keys.missing_keys)

    def _warn(self, what: str, stack_level: int) -> None:
        if self.stale:
            others = [stage for stage in range(self._num_stages) if stage not in self._own]
            elsewhere = [
                f"stages {', '.join(map(str, others))} of {self._num_stages} are trained by other "
                "ranks, and are here as they were when training began"
            ] * bool(others)
            elsewhere += [
                "layers that this process shares with other tensor ranks are on meta, without "
                "values, since each has a part of them"
            ] * self._in_parts
            warnings.warn(
                f"{what} reads weights that this process has not trained: "
                f"{'; '.join(elsewhere)}. pipeline.gather_state_dict(), called on every rank, "
                "gives all of them; pipeline.evaluate runs the model",
                RuntimeWarning,
                stacklevel=stack_level,
            )
