"""Cutting minibatches: nothing lost, sizes even, weights that make the loss one device's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import InputError
from penstock.engine.model import microbatches, tree
from penstock.engine.model.microbatches import (
    Weighting,
    join_slices,
    sequence_length,
    split_sequence,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


@st.composite
def minibatches(draw):
    """(nested tensors with the same number of rows, rows)."""
    rows = draw(st.integers(1, 40))
    tensors = st.builds(
        lambda width, dtype: torch.arange(rows * width).reshape(rows, width).to(dtype),
        st.integers(0, 3),
        st.sampled_from(DTYPES),
    )
    leaves = st.one_of(tensors, tensors.map(lambda t: t.t().contiguous().t()), st.none())
    nested = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        ),
        max_leaves=5,
    )
    value = draw(nested)
    return (value, draw(tensors)), rows


@given(minibatch=minibatches(), count=st.integers(1, 12))
def test_joining_undoes_splitting(minibatch, count):
    value, rows = minibatch
    count = min(count, rows)
    parts = microbatches.split(value, count)
    sizes = [microbatches.num_rows(part, "parts") for part in parts]
    assert len(parts) == count
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    joined = microbatches.join(parts)
    assert tree.flatten(joined)[1] == tree.flatten(value)[1]
    for ours, theirs in zip(tree.tensors(joined), tree.tensors(value), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@given(
    rows=st.integers(1, 100),
    count=st.integers(1, 12),
    counts=st.lists(st.integers(0, 9), max_size=9),
)
def test_the_weights_of_a_mean_sum_to_one(rows, count, counts):
    parts = microbatches.split(torch.zeros(rows), min(count, rows))
    weights = Weighting().of(parts)
    assert sum(weights) == pytest.approx(1.0)
    assert weights == [len(part) / rows for part in parts]
    assert [*microbatches.shares_of_rows(rows, len(parts))] == weights
    if sum(counts):
        weights = Weighting("mean", torch.tensor).of([*counts])
        assert sum(weights) == pytest.approx(1.0)


def test_a_sum_is_not_weighted():
    assert Weighting("sum").of([1, 2, 3]) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("counts", [[0, 0], [-1, 2], [1, -1], [float("nan"), 1], [float("inf"), 1]])
def test_weights_that_count_nothing_are_refused(counts):
    with pytest.raises(InputError, match="must count terms"):
        Weighting("mean", float).of(counts)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "inputs hold no tensor"),
        ([], "inputs hold no tensor"),
        (torch.tensor(1.0), "a tensor without dimensions; the first one must be the rows"),
        ((torch.ones(2), torch.tensor(1.0)), "a tensor without dimensions"),
        (
            (torch.ones(2), torch.ones(3, 2)),
            r"in their number of rows: 2 in inputs\[0\] \(2,\), 3 in inputs\[1\] \(3, 2\); all",
        ),
        (
            {"x": torch.ones(4, 2), "more": {"mask": torch.ones(2)}},
            r"4 in inputs\['x'\] \(4, 2\), 2 in inputs\['more'\]\['mask'\] \(2,\); .* expand what",
        ),
        (torch.ones(0, 4), "inputs have no rows"),
    ],
)
def test_what_has_no_rows_is_refused(value, message):
    with pytest.raises(InputError, match=message):
        microbatches.num_rows(value, "inputs")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([torch.tensor(1.0)] * 2, "a tensor without rows"),
        ([(torch.ones(1), 1), (torch.ones(1), 2)], r"differs between microbatches: \(1, 2\)"),
        ([[torch.ones(1)], (torch.ones(1),)], "nested in different ways"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(values, message):
    # A first microbatch's number for all of them, or a lost row, would be silent.
    with pytest.raises(InputError, match=message):
        microbatches.join(values)


@given(
    rows=st.integers(1, 4),
    length=st.integers(1, 12),
    num_slices=st.integers(1, 12),
    count=st.integers(1, 3),
)
def test_joining_undoes_slicing(rows, length, num_slices, count):
    num_slices = min(num_slices, length)
    values = [
        {"a": torch.randn(rows, length, 2), "b": (torch.arange(rows * length).view(rows, -1), 3)}
        for _ in range(count)
    ]
    parts = [one for value in values for one in split_sequence(value, num_slices, "values")]
    lengths = [sequence_length(part, "parts") for part in parts[:num_slices]]
    assert sum(lengths) == length
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    for ours, theirs in zip(join_slices(parts, num_slices), values, strict=True):
        assert torch.equal(ours["a"], theirs["a"])
        assert torch.equal(ours["b"][0], theirs["b"][0])
        assert ours["b"][1] == 3


def test_slices_have_memory_of_their_own():
    value = torch.zeros(2, 6)
    for part in split_sequence(value, 3, "values"):
        part.add_(1)
    assert not value.any()


@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    length=st.integers(2, 9),
    num_slices=st.integers(2, 5),
)
def test_a_slice_counts_by_its_rows_and_positions(rows, length, num_slices):
    num_slices = min(num_slices, length)
    parts = [
        part for n in rows for part in split_sequence(torch.zeros(n, length), num_slices, "targets")
    ]
    weights = Weighting().of(parts, sliced=True)
    total = sum(rows) * length
    assert weights == pytest.approx([part.numel() / total for part in parts])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3), r"values cannot be cut into slices.* their shapes are \(3,\); choose"),
        ([torch.zeros(3, 4), torch.zeros(3, 5)], r"shapes are \(3, 4\), \(3, 5\)"),
        (torch.zeros(3, 4), "values have 4 positions, which do not make 5 slices; give longer"),
    ],
)
def test_what_has_no_sequence_cannot_be_sliced(value, message):
    with pytest.raises(InputError, match=message):
        split_sequence(value, 5, "values")
