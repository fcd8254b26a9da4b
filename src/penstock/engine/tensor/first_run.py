"""The first run of a divided layer, beside the whole layer on the whole value.

Nobody can read off a user's code whether its parts, put together, are what one device computes: a
view behind a ``column`` moves the features to another dimension, a softmax may mix what is divided,
attention in a layer of which each member has some positions sees only those. So it is tried: each
member puts the whole layer together once, in main memory, gives it the whole value, and compares.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from penstock.engine.model import tree
from penstock.engine.model.randomness import RandomStream, current_stream
from penstock.engine.model.replay import autocast_here

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 0.1
"""Of the largest number: what half precision may make of another order of sums. A layer that
computes something else is off by about as much as its numbers are large."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Expected(NamedTuple):
    """The outcome on one device.

    Attributes:
        output: of the layer, in main memory.
        drew: whether it drew random numbers.
    """

    output: Any
    drew: bool


def on_one_device(
    layer: nn.Module,
    values: Mapping[int, Tensor],
    member: nn.Module,
    given: tuple[Any, Mapping[str, Any]],
) -> Expected | None:
    """Run a whole layer on a whole value, with the random numbers that the member will draw.

    Args:
        layer: the user's, whose structure counts; it is not changed.
        values: whole parameters and buffers in main memory, by the ids of the layer's.
        member: the member's layer, which tells what trains.
        given: what it is called with: its input, and what it recalls.

    Returns:
        ``None`` if it cannot run there: the member's own run says why, or its device is another.
    """
    stream = current_stream()
    # Modes look on: the stream itself, and who counts memory.
    with torch.no_grad(), _disable_current_modes(), RandomStream(0) as again:
        if stream is not None:
            again.repeat(stream)
        try:
            whole: nn.Module = copy.deepcopy(layer, {**values})
            for ours, theirs in zip(whole.modules(), member.modules(), strict=True):
                ours.training = theirs.training
                _leave_out_hooks(ours)
            value, recalled = tree.replace(Tensor, _copied, (given[0], dict(given[1])))
            output = whole(value, **recalled)
        except Exception:  # whatever the user's code raises
            return None
    return Expected(output, again.drew)


def _leave_out_hooks(module: nn.Module) -> None:
    """Those of users watch the member's layer; torch's own compute weights."""
    for name in _HOOKS:
        held = vars(module)[name]
        vars(module)[name] = type(held)(
            (key, hook)
            for key, hook in held.items()
            if type(hook).__module__.startswith("torch.nn.utils")
        )


def _copied(tensor: Tensor) -> Tensor:
    """In main memory, for a layer that may overwrite it."""
    return tensor.detach().to("cpu", copy=True)


def divided_dimension(part: Any, whole: Any) -> int | None:
    """The one dimension in which a member's output is not as long as the whole one; ``None`` if
    there is none, or more."""
    for mine, other in zip(tree.tensors(part), tree.tensors(whole), strict=False):
        if mine.dim() == other.dim():
            shorter = [dim for dim in range(mine.dim()) if mine.shape[dim] != other.shape[dim]]
            return shorter[0] if len(shorter) == 1 else None
    return None


def difference(given: Any, expected: Any, *, draws_alike: bool) -> str:
    """How an output of all members differs from that of one device; empty if it does not.

    Args:
        draws_alike: whether random numbers are the same, so that values can be compared.
    """
    ours, theirs = tree.tensors(given), tree.tensors(expected)
    if len(ours) != len(theirs):
        return f"gives {len(ours)} tensors, and {len(theirs)} on one device"
    if _numbers(given) != _numbers(expected):
        return f"gives the numbers {_numbers(given)}, and {_numbers(expected)} on one device"
    for mine, other in zip(ours, theirs, strict=True):
        if mine.shape != other.shape:
            return f"gives shape {tuple(mine.shape)}, and {tuple(other.shape)} on one device"
        off = _off(mine, other) if draws_alike else 0.0
        if off == inf:
            return "gives other numbers, some of which rounding does not change"
        if off:
            return f"gives numbers that are off by {off:.2g} of the largest one on one device"
    return ""


def _numbers(value: Any) -> list[Any]:
    """The leaves of a value that are numbers or words, which count rows perhaps."""
    return [leaf for leaf in tree.flatten(value)[0] if isinstance(leaf, bool | int | float | str)]


def _off(mine: Tensor, other: Tensor) -> float:
    """How far values are apart, as a part of the largest; 0 if rounding explains it, and infinity
    where there is none to explain it by."""
    has_rounding = other.is_floating_point() or other.is_complex()
    wide = torch.complex128 if other.is_complex() else torch.float64
    ours, theirs = mine.detach().to("cpu", wide), other.to(wide)
    if not has_rounding:
        return 0.0 if torch.equal(ours, theirs) else inf
    finite = torch.isfinite(theirs) & torch.isfinite(ours)
    if not torch.allclose(ours[~finite], theirs[~finite], equal_nan=True):
        return inf
    if not finite.any():
        return 0.0
    tolerance = _COARSE if autocast_here() else _TOLERANCES.get(mine.dtype, _COARSE)
    largest = float(theirs[finite].abs().max())
    apart = float((ours - theirs)[finite].abs().max())
    return apart / max(largest, tolerance) if apart > tolerance * largest else 0.0
