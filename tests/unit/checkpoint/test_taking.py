"""What members of groups, and copies that update by rows, write of a stage is the whole of it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.engine.reduce.buckets import row_shards_of
from penstock.engine.tensor.group import ShardSpec
from penstock.training.checkpoint.header import TensorExtent
from penstock.training.checkpoint.taking import StageShard


def rows_of(name, parameter, copy, num_copies):
    """The rows of a parameter that a copy updates: what an optimizer keeps of them, and where."""
    slices = row_shards_of([parameter], dict.fromkeys(range(num_copies), 1))
    for _, start, stop in slices[copy].ranges:
        row = parameter[0].numel()
        shape = tuple(parameter.shape)
        first = (start // row, *(0 for _ in shape[1:]))
        value = parameter.detach()[start // row : stop // row]
        extent = TensorExtent(dtype="float64", shape=shape, start=first, size=tuple(value.shape))
        return {name: value}, {name: extent}
    return {}, {}


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 3),
    per_block=st.integers(1, 5),
    width=st.integers(1, 5),
    dim=st.integers(0, 1),
    size=st.integers(1, 3),
    num_copies=st.integers(1, 3),
)
def test_pieces_of_all_copies_and_members_are_the_whole(
    blocks, per_block, width, dim, size, num_copies
):
    shape = [width, width]
    shape[dim] = blocks * per_block
    whole = torch.arange(1.0, 1.0 + shape[0] * shape[1], dtype=torch.float64).view(shape)
    cut, name = ShardSpec(dim, blocks), "optimizer/weight/momentum"
    found, times = torch.zeros_like(whole), torch.zeros_like(whole)
    numbers = set()
    for copy in range(num_copies):
        for coordinate in range(size):
            division = StageShard({"weight": cut}, {"weight": tuple(shape)}, 3, coordinate, size)
            part = nn.Parameter(cut.part(whole, size, coordinate))
            if not part.numel():
                continue
            tensors, extents = rows_of(name, part, copy, num_copies)
            for piece in division.pieces(tensors, extents, copy, num_copies):
                numbers.add(piece.part)
                assert piece.num_parts == 3 * size * num_copies
                assert piece.tells == (coordinate == piece.part % 3 == 0)
                for extent, tensor in piece.tensors.values():
                    assert extent.shape == tuple(shape)
                    place = tuple(
                        slice(first, first + count)
                        for first, count in zip(extent.start, extent.size, strict=True)
                    )
                    found[place] += tensor
                    times[place] += 1
    assert torch.equal(found, whole)
    assert torch.equal(times, torch.ones_like(whole))
    assert numbers <= set(range(3 * size * num_copies))
