"""Recurrent layers as the few kernels that libraries make of them, on meta, and what these keep.

cuDNN and oneDNN compute the products with the inputs of all steps at once, and keep the gates of
all steps. The products with the state come one after the other, each of which reads the weights.
What is kept for the backward is each library's own: oneDNN's workspace of an LSTM, what torch's
steps of a GRU or a plain layer save on a CPU, and cuDNN's reserve, of which nobody says how large
it is (taken as the gates and two states of every step).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import _VF, Tensor
from torch.autograd.function import once_differentiable

_PAGE_BYTES = 4096
_LINE_FLOATS = 16
_LSTM = 2
"""What torch and oneDNN call an LSTM."""


class _KeptByLibrary(NamedTuple):
    """What one direction of a layer keeps beside its weights.

    Attributes:
        buffer: bytes of the library's own buffer.
        in_one: whether a direction is one kernel, oneDNN's.
        output: whether it keeps its output, too.
        ends: how many states of one step, as the first and the last.
        copies_input: whether each direction makes a copy of an input that is not contiguous.
        copies_weights: whether it keeps weights in another order.
    """

    buffer: int
    in_one: bool
    output: bool
    ends: int
    copies_input: bool
    copies_weights: bool


def _kept(gates: int, value: Tensor, width: int, has_biases: bool, on_gpu: bool) -> _KeptByLibrary:
    steps, rows, given = value.shape
    state = steps * rows * width * value.element_size()
    if on_gpu:
        return _KeptByLibrary((gates + 2) * state, False, True, 1 + (gates == 4), False, False)
    if gates == 4:
        buffer = _onednn_bytes(steps, rows, given, width, value.element_size())
        return _KeptByLibrary(buffer, True, True, 4, False, not has_biases)
    # A step of a GRU keeps its three gates, both factors of two products, and the state it began
    # with; one of a plain layer its result.
    return _KeptByLibrary(
        7 * state if gates == 3 else state + state // steps, False, False, 0, True, False
    )


def _onednn_bytes(steps: int, rows: int, given: int, width: int, element_size: int) -> int:
    """The workspace of an LSTM's training (``mkldnn_rnn_layer``), as it was found by asking for
    layers of many shapes: rows are padded to whole lines, and by another line where they would
    share cache sets; every part begins on a page."""

    def padded(count: int) -> int:
        lines = math.ceil(count / _LINE_FLOATS) * _LINE_FLOATS
        return lines + _LINE_FLOATS * (lines % 256 == 0)

    state, change = 2 * width, 2 * padded(max(given, width))
    parts = [steps * padded(4 * width), steps * padded(width)]
    parts += [(steps + 1) * count for count in (state, state, change, change, change)]
    pages = [math.ceil(part * rows * element_size / _PAGE_BYTES) for part in parts]
    return _PAGE_BYTES * sum(pages)


class FusedRecurrence(torch.autograd.Function):
    """One direction of a layer over all steps, of tensors on meta: (steps, rows, width)."""

    @staticmethod
    def forward(
        ctx: Any, gates: int, kept: _KeptByLibrary, value: Tensor, *weights: Tensor
    ) -> Tensor:
        value, (own, recurrent, *biases) = value.detach(), [part.detach() for part in weights]
        with torch.enable_grad():  # so that nobody takes this for a backward
            if kept.in_one:
                output = _in_one(value, own, recurrent, bool(biases)).forward()[0]
            else:
                output = _step_by_step(gates, value, own, recurrent, biases)
        ctx.gates, ctx.has_biases, ctx.in_one = gates, bool(biases), kept.in_one
        copies = [part.new_empty(part.shape) for part in (own, recurrent) if kept.copies_weights]
        ctx.save_for_backward(
            value,
            own,
            recurrent,
            output if kept.output else None,
            value.new_empty(kept.buffer, dtype=torch.uint8),
            *(value.new_empty(output.shape[1:]) for _ in range(kept.ends)),
            *copies,
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        value, own, recurrent, output, *_ = ctx.saved_tensors
        if ctx.in_one:
            layer = _in_one(value, own, recurrent, ctx.has_biases)
            state, workspace = layer.operands[-1], value.new_empty(0, dtype=torch.uint8)
            made = layer.backward(output, state, state, workspace)
            return None, None, *made[: 3 + 2 * ctx.has_biases]
        change = gradients[0] * gradients[0]
        for _ in range(ctx.gates - 1):
            change = change * gradients[0]
        opened = torch.ops.aten.sigmoid_backward(
            *(change.new_empty(*change.shape[:2], own.shape[0]) for _ in range(2))
        )
        torch.bmm(opened, recurrent.expand(len(value), *recurrent.shape))
        rows = opened.flatten(0, 1)
        given = torch.mm(rows, own).view_as(value) if ctx.needs_input_grad[2] else None
        weights = [rows.t() @ part.flatten(0, 1) for part in (value, change)]
        biases = [rows.sum(0), rows.sum(0)] if ctx.has_biases else []
        return None, None, given, *weights, *biases


def _step_by_step(
    gates: int, value: Tensor, own: Tensor, recurrent: Tensor, biases: Sequence[Tensor]
) -> Tensor:
    ahead = torch.nn.functional.linear(value, own, biases[0] if biases else None)
    states = ahead.new_empty(*value.shape[:2], recurrent.shape[1])
    again = torch.bmm(states, recurrent.t().expand(len(value), *recurrent.t().shape))
    if biases:
        again = again + biases[1]
    opened = torch.sigmoid(ahead + again)
    output = opened[..., : recurrent.shape[1]].contiguous()
    for _ in range(gates - 1):
        output = output * states
    return torch.tanh(output)


def _in_one(value: Tensor, own: Tensor, recurrent: Tensor, has_biases: bool) -> Onednn:
    state = value.new_empty(1, value.shape[1], recurrent.shape[1])
    bias = own.new_empty(own.shape[0])
    return Onednn((value, own, recurrent, bias, bias, state, state), has_biases)


class Onednn(NamedTuple):
    """One direction of an LSTM as oneDNN computes it.

    Attributes:
        operands: the inputs of all steps, the weights of inputs and states, both biases, and the
            first state and cell.
        has_biases: whether the biases count.
    """

    operands: Sequence[Tensor]
    has_biases: bool = True

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs of all steps, the last state and cell, and the workspace of the backward,
        which is there while gradients are enabled."""
        made: tuple[Tensor, ...] = torch.ops.aten.mkldnn_rnn_layer(
            *self.operands, False, [], _LSTM, self._width, 1, self.has_biases, False, False, True
        )
        return made

    def backward(
        self, output: Tensor, last: Tensor, cell: Tensor, workspace: Tensor
    ) -> Sequence[Tensor]:
        """The gradients of the operands, of gradients of the outputs like these, and of what
        ``forward`` made."""
        gradients: Sequence[Tensor] = torch.ops.aten.mkldnn_rnn_layer_backward(
            *self.operands, output, last, cell, output, None, None, False, _LSTM, self._width, 1,
            self.has_biases, True, False, [], False, workspace,
        )  # fmt: skip
        return gradients

    @property
    def _width(self) -> int:
        return self.operands[-1].shape[-1]


def _layers_of_kind(  # noqa: PLR0913, PLR0917 - torch's own
    gates: int,
    on_gpu: bool,
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
    """What a call of torch for several layers gives; ``None`` for packed sequences and for
    projected states, which torch computes step by step."""
    directions = 1 + bidirectional
    each = len(weights) // (num_layers * directions) if isinstance(has_biases, bool) else 0
    if each != (4 if has_biases else 2):
        return None
    value = inputs.transpose(0, 1) if batch_first else inputs
    ends: list[Tensor] = []
    for layer in range(num_layers):
        outputs = []
        whole = value.contiguous()
        for direction in range(directions):
            first = (layer * directions + direction) * each
            own = weights[first : first + each]
            width = own[1].shape[0] // gates
            kept = _kept(gates, whole, width, has_biases, on_gpu)
            given = value.contiguous() if direction and kept.copies_input else whole
            output = FusedRecurrence.apply(gates, kept, given, *own)  # type: ignore[no-untyped-call]
            outputs.append(output)
            ends.append(output[-1])
        value = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer + 1 < num_layers:
            value = torch.dropout(value, dropout, train)
    last = torch.stack(ends)
    result = value.transpose(0, 1) if batch_first else value
    return (result, last, last.clone()) if gates == 4 else (result, last)


_GATES = {_VF.lstm: 4, _VF.gru: 3, _VF.rnn_tanh: 1, _VF.rnn_relu: 1}


def recurrences(*, on_gpu: bool) -> dict[Any, Callable[..., Any]]:
    """By torch's function, what stands for it."""
    return {function: partial(_layers_of_kind, gates, on_gpu) for function, gates in _GATES.items()}
