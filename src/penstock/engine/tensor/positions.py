"""Whether a module does with each position the same, so that members can give it some of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.model import tree
from penstock.engine.model.randomness import RandomStream
from penstock.engine.tensor.splits import has_batch_statistics

_MOST_NUMBERS = 1 << 24
"""Of a module that is tried; what is larger is no norm, nor a gate."""


def acts_by_position(module: nn.Module, features: Sequence[int]) -> bool:
    """Whether a module treats every position by itself: a linear layer does, and of others it is
    tried, on a few positions, with numbers in the place of its weights: classes of norms are many.

    Args:
        features: the sizes of a value behind its rows and positions.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return True
    held = [*module.parameters(), *module.buffers()]
    if has_batch_statistics(module) or sum(map(Tensor.numel, held)) > _MOST_NUMBERS:
        return False
    sample = _numbers((2, 4, *features), torch.float32)
    try:
        with torch.no_grad(), RandomStream(0) as stream:
            own = _with_numbers(module)
            whole = own(sample)
            parts = torch.cat([own(part) for part in torch.split(sample, [1, 3], 1)], 1)
    except Exception:  # whatever it is, it is nothing that takes these positions
        return False
    is_alike = isinstance(whole, Tensor) and whole.shape == sample.shape and not stream.drew
    return is_alike and torch.allclose(whole, parts, rtol=1e-4, atol=1e-5)


def asks_for_no_values(module: nn.Module, value: Tensor, others: Mapping[str, Tensor]) -> bool:
    """Whether what a module without parameters gives does not depend on the numbers, and positions,
    of its first input: modules that compute rotations ask that for its dtype and device only.

    Args:
        value, others: that input, and those behind it by their names; only their shapes count.
    """
    if any(True for _ in module.parameters()):
        return False
    rows, positions, *features = value.shape
    # Of long sequences of wide models, numbers for each feature would be gigabytes.
    few = _numbers((rows, positions, *[1] * len(features)), torch.float32)
    sample = few.expand(value.shape)
    given = {name: torch.ones(other.shape, dtype=other.dtype) for name, other in others.items()}
    try:
        with torch.no_grad(), RandomStream(0) as stream:
            own = _with_numbers(module)
            first, second = own(sample, **given), own(sample[:, :1] + 1, **given)
    except Exception:  # whatever it is, it does look at its input
        return False
    pairs = zip(tree.flatten(first)[0], tree.flatten(second)[0], strict=False)
    return not stream.drew and all(
        isinstance(mine, Tensor) and mine.shape == other.shape and torch.equal(mine, other)
        for mine, other in pairs
    )


def _numbers(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers of which no two positions have the same."""
    size = torch.Size(shape)
    return torch.linspace(0.0, 2.0 * size.numel(), size.numel()).sin().view(size).to(dtype)


def _with_numbers(module: nn.Module) -> nn.Module:
    """A copy in main memory; the module's own weights may be on another device, or none."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        numbers = _numbers(parameter.shape, parameter.dtype) + 2
        memo[id(parameter)] = nn.Parameter(numbers, requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.ones(buffer.shape, dtype=buffer.dtype)
    own: nn.Module = copy.deepcopy(module, memo)
    return own.float()
