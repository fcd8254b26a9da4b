"""Who owns which rows, and which optimizers may have rows only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.errors import InputError
from penstock.reduce.sharding import Shard, Shards, row_slices_of

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=SHAPES, num_owners=st.integers(1, 5))
def test_every_row_has_one_owner_and_owners_are_as_equal_as_rows_allow(shapes, num_owners):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    slices = row_slices_of(parameters, range(num_owners))
    owned = [torch.zeros(parameter.numel()) for parameter in parameters]
    for _, pieces in slices:
        for place, start, stop in pieces:
            assert start < stop
            row = parameters[place][0].numel() if parameters[place].dim() else 1
            assert start % row == stop % row == 0
            owned[place][start:stop] += 1
    assert all((one == 1).all() for one in owned)
    sizes = [sum(piece.stop - piece.start for piece in pieces) for _, pieces in slices]
    rows = [one[0].numel() if one.dim() else 1 for one in parameters if one.numel()]
    assert max(sizes) - min(sizes) <= 2 * max(rows, default=0)


def shards_of(parameter):
    rows = nn.Parameter(parameter.detach()[1:3])
    return Shards({parameter: Shard(1, rows)}), rows


def test_an_optimizer_steps_rows_in_the_memory_of_the_whole():
    whole = nn.Parameter(torch.ones(4, 2))
    shards, rows = shards_of(whole)
    optimizer = torch.optim.SGD([whole], lr=1.0, momentum=0.5)
    shards.put_into(optimizer, "stage 0")
    assert optimizer.param_groups[0]["params"] == [rows]
    whole.grad = torch.arange(8.0).view(4, 2)
    shards.lend()
    optimizer.step()
    assert whole.tolist() == [[1, 1], [-1, -2], [-3, -4], [1, 1]]
    shards.clear([whole])
    assert whole.grad is None
    assert rows.grad is None


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Muon])
def test_an_optimizer_that_may_need_whole_parameters_is_refused_by_name(make):
    whole = nn.Parameter(torch.ones(4, 2))
    optimizer = make([whole])
    with pytest.raises(InputError, match=f"{make.__name__}, the optimizer of stage 3, may need"):
        shards_of(whole)[0].put_into(optimizer, "stage 3")


def test_a_class_may_say_that_it_needs_no_whole_parameters():
    class Own(torch.optim.SGD):
        elementwise = True

    whole = nn.Parameter(torch.ones(4, 2))
    shards, rows = shards_of(whole)
    optimizer = Own([whole], lr=1.0)
    shards.put_into(optimizer, "stage 0")
    assert optimizer.param_groups[0]["params"] == [rows]
