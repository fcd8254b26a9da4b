"""Twins of modules of experts: the same code and attributes with other weights, and with some of
the experts only."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn

from penstock.engine.model.experts import FoundExperts


def twin_of(
    mixture: FoundExperts, instead: Mapping[int, nn.Parameter], numbers: range
) -> nn.Module:
    """A module of some of the experts of a mixture, numbered from 0.

    Args:
        mixture: which is left as it is.
        instead: the parameters of the twin, by the ids of the mixture's own: of stacked weights
            the rows of these experts, of a list those of its modules.
        numbers: of these experts.
    """
    twin = _twin(mixture.module, instead)
    if mixture.is_list:
        kept = [twin._modules[f"{number}"] for number in numbers]
        twin._modules = {str(place): child for place, child in enumerate(kept)}
    if hasattr(twin, "num_experts"):
        twin.__dict__["num_experts"] = len(numbers)
    return twin


def _twin(module: nn.Module, instead: Mapping[int, nn.Parameter]) -> nn.Module:
    """A module with the same attributes, code and buffers, and other parameters."""
    own = copy.copy(module)
    own._parameters = {
        name: None if weight is None else instead[id(weight)]
        for name, weight in module._parameters.items()
    }
    own._modules = {
        name: None if child is None else _twin(child, instead)
        for name, child in module._modules.items()
    }
    return own
