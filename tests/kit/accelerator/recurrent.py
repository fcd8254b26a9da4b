"""Recurrent layers on an emulated device, with the bits that they have on the CPU.

Torch calls fused cells on every accelerator. The CPU has none: it multiplies the inputs of all
steps at once, and gives an LSTM of single precision to oneDNN. The same is said here with ops that
run on any device, so that autograd, the ledger and the accounts of memory see each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

_ONEDNN_LSTM = 2  # oneDNN's number for this kind of recurrent layer

Hidden = tuple[Tensor, ...]
Cell = Callable[[Tensor, Hidden, "Weights"], Hidden]


class Weights:
    """The weights of one layer in one direction."""

    def __init__(self, tensors: Sequence[Tensor], has_biases: bool):
        (self.of_input, self.of_hidden), rest = tensors[:2], list(tensors[2:])
        self.input_bias, self.hidden_bias = (
            (rest.pop(0), rest.pop(0)) if has_biases else (None,) * 2
        )
        self.projection = rest[0] if rest else None

    def from_input(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.of_input, self.input_bias)

    def from_hidden(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.of_hidden, self.hidden_bias)


def _lstm(from_input: Tensor, hidden: Hidden, weights: Weights) -> Hidden:
    output, memory = hidden
    gates = weights.from_hidden(output).add_(from_input).unsafe_chunk(4, 1)
    write, keep = gates[0].sigmoid_(), gates[1].sigmoid_()
    candidate, read = gates[2].tanh_(), gates[3].sigmoid_()
    memory = (keep * memory).add_(write * candidate)
    output = read * memory.tanh()
    if weights.projection is not None:
        output = torch.matmul(output, weights.projection.t())
    return output, memory


def _gru(from_input: Tensor, hidden: Hidden, weights: Weights) -> Hidden:
    (before,) = hidden
    of_input = from_input.unsafe_chunk(3, 1)
    of_hidden = weights.from_hidden(before).unsafe_chunk(3, 1)
    reset = of_hidden[0].add_(of_input[0]).sigmoid_()
    keep = of_hidden[1].add_(of_input[1]).sigmoid_()
    candidate = of_input[2].add(of_hidden[2].mul_(reset)).tanh_()
    return ((before - candidate).mul_(keep).add_(candidate),)


def _simple(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(from_input: Tensor, hidden: Hidden, weights: Weights) -> Hidden:
        return (activation(weights.from_hidden(*hidden).add_(from_input)),)

    return cell


def _one_direction(
    cell: Cell, inputs: Tensor, hidden: Hidden, weights: Weights, backwards: bool
) -> tuple[Tensor, Hidden]:
    steps = weights.from_input(inputs).unbind(0)
    outputs = []
    for step in reversed(steps) if backwards else steps:
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 0), hidden


def _by_onednn(
    inputs: Tensor, hidden: Hidden, weights: Weights, backwards: bool, of_all: tuple
) -> tuple[Tensor, Hidden]:
    """One direction of an LSTM's layer; oneDNN also asks about ``of_all`` layers."""
    has_biases = weights.input_bias is not None
    biases = (
        (weights.input_bias, weights.hidden_bias)
        if has_biases
        else (torch.zeros_like(weights.of_input), torch.zeros_like(weights.of_hidden))
    )
    num_layers, bidirectional, batch_first, train = of_all
    output, last_output, memory, _ = torch.mkldnn_rnn_layer(
        inputs, weights.of_input, weights.of_hidden, *biases, *hidden, backwards, [], _ONEDNN_LSTM,
        hidden[0].shape[-1], num_layers, has_biases, bidirectional, batch_first, train,
    )  # fmt: skip
    return output, (last_output, memory)


def _takes_onednn(inputs: Tensor, weights: Sequence[Weights]) -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and inputs.dtype == torch.float32
        and inputs.numel() > 0
        and all(layer.projection is None for layer in weights)
    )


def _layers(cell: Cell):
    """The op of a whole recurrent module: layers, directions, and dropout between layers."""

    def recurrent(inputs, hidden, params, has_biases, num_layers, *how):
        dropout, train, bidirectional, batch_first = how
        states = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)
        num_directions = 2 if bidirectional else 1
        per_layer = len(params) // (num_layers * num_directions)
        weights = [
            Weights(params[start : start + per_layer], has_biases)
            for start in range(0, len(params), per_layer)
        ]
        run = functools.partial(_one_direction, cell)
        if batch_first:
            inputs = inputs.transpose(0, 1)
        if cell is _lstm and _takes_onednn(inputs, weights):
            of_all = num_layers, bidirectional, batch_first, train
            run = functools.partial(_by_onednn, of_all=of_all)
            inputs, states = inputs.contiguous(), [state.contiguous() for state in states]
        hiddens = list(zip(*(state.unbind(0) for state in states), strict=True))
        last: list[Hidden] = []
        for layer in range(num_layers):
            outputs = []
            for direction in range(num_directions):
                number = layer * num_directions + direction
                output, after = run(inputs, hiddens[number], weights[number], direction > 0)
                outputs.append(output)
                last.append(after)
            inputs = torch.cat(outputs, -1) if bidirectional else outputs[0]
            if dropout and train and layer < num_layers - 1:
                inputs = torch.dropout(inputs, dropout, True)
        if batch_first:
            inputs = inputs.transpose(0, 1)
        return inputs, *(torch.stack(states, 0) for states in zip(*last, strict=True))

    return recurrent


def _single(cell: Cell):
    """The op of a cell: one step, whose input is multiplied by itself."""

    def step(inputs, hidden, of_input, of_hidden, input_bias=None, hidden_bias=None):
        tensors = [of_input, of_hidden]
        has_biases = input_bias is not None
        weights = Weights(
            [*tensors, input_bias, hidden_bias] if has_biases else tensors, has_biases
        )
        is_pair = isinstance(hidden, (list, tuple))
        after = cell(weights.from_input(inputs), tuple(hidden) if is_pair else (hidden,), weights)
        return after if is_pair else after[0]

    return step


@functools.cache
def register() -> torch.library.Library:
    """Takes over torch's recurrent ops on the devices, as long as the library lives."""
    library = torch.library.Library("aten", "IMPL")
    ops = {
        "lstm.input": _layers(_lstm),
        "gru.input": _layers(_gru),
        "rnn_tanh.input": _layers(_simple(torch.tanh)),
        "rnn_relu.input": _layers(_simple(torch.relu)),
        "lstm_cell": _single(_lstm),
        "gru_cell": _single(_gru),
    }
    for name, op in ops.items():
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            library.impl(name, op, key)
    return library
