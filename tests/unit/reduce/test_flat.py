"""Gradients as flat buffers: where each lies, what stands for those that are not there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.base.errors import RunError
from penstock.engine.reduce.flat import FlatBuffers, FlatLayout, PlacedGradient

SHAPES = [
    ((2, 3), torch.float32),
    ((4,), torch.float64),
    ((0, 5), torch.float32),
    ((), torch.float32),
    ((3,), torch.bfloat16),
]


def parameters_of(value=None):
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in SHAPES]
    for place, parameter in enumerate(parameters if value is not None else ()):
        parameter.grad = torch.full_like(parameter, value + place)
    return parameters


@pytest.mark.parametrize(
    ("frozen", "placed", "counts"),
    [
        (
            (),
            [(4, 3, 0, 3), (3, 0, 0, 1), (2, 0, 1, 1), (1, 1, 0, 4), (0, 0, 1, 7)],
            {3: 3, 0: 7, 1: 4},
        ),
        ((0, 4), [(3, 0, 0, 1), (2, 0, 1, 1), (1, 1, 0, 4)], {0: 1, 1: 4}),
        ((0, 1, 2, 3, 4), [], {}),
    ],
)
def test_the_last_parameters_gradients_lie_first_in_the_buffer_of_their_type(
    frozen, placed, counts
):
    layout = FlatLayout(parameters_of(), frozen)
    assert layout.placed == [PlacedGradient(*one) for one in placed]
    assert layout.counts == counts
    sizes = {dtype: len(tensor) for dtype, tensor in FlatBuffers(layout.counts).tensors.items()}
    assert sizes == counts


def test_numbers_that_nobody_sums_are_refused():
    with pytest.raises(RunError, match=r"type torch\.complex64 can't be summed so; plan with"):
        FlatLayout([nn.Parameter(torch.zeros(1, dtype=torch.complex64))], ())


def test_what_is_copied_in_comes_out_divided():
    parameters = parameters_of(value=8.0)
    parameters[3].grad = None
    layout = FlatLayout(parameters, ())
    buffers = FlatBuffers(layout.counts)
    there = {one.place: buffers.copy(one, parameters) for one in layout.placed}
    assert there == {0: True, 1: True, 2: True, 3: False, 4: True}
    assert buffers.tensors[0].tolist() == [0, *[8] * 6]
    assert buffers.tensors[0][0].signbit()  # −0, which changes no sum
    assert buffers.tensors[1].tolist() == [9] * 4
    for parameter in parameters:
        parameter.grad = None
    for one in layout.placed:
        if one.place != 3:
            buffers.put(one, parameters, 2)
    assert parameters[3].grad is None
    for place, value in {0: 4.0, 1: 4.5, 4: 6.0}.items():
        assert torch.equal(parameters[place].grad, torch.full_like(parameters[place], value))
    assert parameters[2].grad.shape == (0, 5)


@pytest.mark.parametrize("divisor", [0, 1])
def test_a_sum_of_one_is_not_divided(divisor):
    parameters = parameters_of(value=3.0)
    layout = FlatLayout(parameters, ())
    buffers = FlatBuffers(layout.counts)
    for one in layout.placed:
        buffers.copy(one, parameters)
    memory = parameters[0].grad.data_ptr()
    for one in layout.placed:
        buffers.put(one, parameters, divisor)
    assert torch.equal(parameters[0].grad, torch.full((2, 3), 3.0))
    assert parameters[0].grad.data_ptr() == memory  # the gradient that was there


def test_sparse_gradients_are_refused():
    parameters = parameters_of()
    parameters[0].grad = torch.eye(3)[:2].to_sparse()
    layout = FlatLayout(parameters, ())
    with pytest.raises(RunError, match="sparse gradients can't be summed between processes"):
        FlatBuffers(layout.counts).copy(layout.placed[-1], parameters)
