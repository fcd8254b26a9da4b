"""What an optimizer will do if it goes on as it does: the direction of its next steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError

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
