"""Over how many items the loss of a model of transformers is a mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

_DOES_NOT_COUNT = -100


def items_of(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Over how many items the loss of these inputs is a mean.

    Labels that are −100 do not count, nor do the first ones of rows from which the next token is
    predicted. Without labels, rows count.

    Args:
        inputs: keywords of the model's ``forward``.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor):
        return next(len(value) for value in inputs.values() if isinstance(value, Tensor))
    counted = labels[..., 1:] if _predicts_the_next(model) else labels
    return int(counted.ne(_DOES_NOT_COUNT).sum())


def _predicts_the_next(model: nn.Module) -> bool:
    shifts = getattr(model, "loss_function", None) is ForCausalLMLoss
    # Decoders behind an encoder are given what they see shifted already.
    return shifts and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
