"""Recurrent layers as the few kernels that libraries make of them, on meta.

cuDNN and oneDNN compute the products with the inputs of all steps at once, and keep the gates of
all steps. The products with the state come one after the other, each of which reads the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import _VF, Tensor


def _layers_of_kind(  # noqa: PLR0913, PLR0917 - torch's own
    gates: int,
    inputs: Tensor,
    state: Any,
    weights: Any,
    has_biases: Any,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """What a call of torch for several layers gives; ``None`` for packed sequences."""
    if not isinstance(has_biases, bool):
        return None
    value = inputs.transpose(0, 1) if batch_first else inputs
    directions, each = 1 + bidirectional, 4 if has_biases else 2
    ends: list[Tensor] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            first = (layer * directions + direction) * each
            output = _direction(gates, value, weights[first : first + each])
            outputs.append(output)
            ends.append(output[-1])
        value = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer + 1 < num_layers:
            value = torch.dropout(value, dropout, train)
    last = torch.stack(ends)
    result = value.transpose(0, 1) if batch_first else value
    return (result, last, last.clone()) if gates == 4 else (result, last)


def _direction(gates: int, value: Tensor, weights: Sequence[Tensor]) -> Tensor:
    own, recurrent, *biases = weights
    steps = value.shape[0]
    width = own.shape[0] // gates if gates > 1 else own.shape[0]
    ahead = torch.nn.functional.linear(value, own, biases[0] if biases else None)
    before = ahead[..., : recurrent.shape[1]].contiguous()  # stands for the states
    again = torch.bmm(before, recurrent.t().expand(steps, *recurrent.t().shape))
    if biases:
        again = again + biases[1]
    opened = torch.sigmoid(ahead + again)
    parts = torch.split(opened, width, -1)
    output = parts[0]
    for part in parts[1:]:
        output = output * part
    return torch.tanh(output)


RECURRENCES: dict[Any, Callable[..., Any]] = {
    _VF.lstm: partial(_layers_of_kind, 4),
    _VF.gru: partial(_layers_of_kind, 3),
    _VF.rnn_tanh: partial(_layers_of_kind, 1),
    _VF.rnn_relu: partial(_layers_of_kind, 1),
}
"""By torch's function, what stands for it."""
