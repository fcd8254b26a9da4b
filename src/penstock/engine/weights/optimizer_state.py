"""What an optimizer keeps of a stage's parameters, as far as it comes and goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.engine.model import tree


def _hides_tensors(value: object) -> bool:
    return isinstance(value, list | tuple | dict) and bool(tree.tensors(value))


def state_tensors(
    optimizer: torch.optim.Optimizer | None, parameters: Sequence[nn.Parameter]
) -> list[Tensor]:
    """What an optimizer keeps of parameters in tensors; single numbers are not worth the way."""
    if optimizer is None:
        return []
    for key, kept in optimizer.state.items():
        if not isinstance(key, nn.Parameter) or any(map(_hides_tensors, kept.values())):
            raise InputError(
                f"{type(optimizer).__name__} keeps tensors that belong to no parameter of its "
                "stage, or several in a list, and these cannot come and go with it; take another "
                'optimizer, or plan with spill="never"'
            )
    own = {id(parameter) for parameter in parameters}
    return [
        value
        for parameter, state in optimizer.state.items()
        if id(parameter) in own
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() and value.layout is torch.strided
    ]
