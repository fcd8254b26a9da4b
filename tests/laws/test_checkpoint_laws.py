"""However tensors are divided over pieces, what is read is what was written, and no more."""

import itertools
import math
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock.base.errors import FileError
from penstock.training.checkpoint.contents import Contents
from penstock.training.checkpoint.folder import checkpoint_in
from penstock.training.checkpoint.header import (
    FORMAT,
    Header,
    Identity,
    TensorExtent,
    of_json,
    to_json,
)
from penstock.training.checkpoint.piece import CheckpointPiece, assembled, write_piece
from tests.kit.examples import examples
from tests.kit.helpers import make_plan
from tests.kit.training import adamw
from tests.numerics.test_checkpoints import Tied, assert_same_training, batch, loss_of


def identity(**fields):
    plain = {
        "format": FORMAT,
        "run": "r",
        "attempt": "a",
        "generation": 0,
        "step": 1,
        "num_stages": 1,
    }
    return Identity(**{**plain, "plan": "p", "seed": 0, **fields})


@st.composite
def grids(draw):
    """(shape, cuts along each dimension) of a divided tensor."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    cuts = [
        sorted(draw(st.sets(st.integers(1, n - 1), max_size=2))) if n > 1 else [] for n in shape
    ]
    return tuple(shape), cuts


def boxes(shape, cuts):
    """(start, size) of all parts."""
    ranges = [
        list(itertools.pairwise([0, *own, length])) for length, own in zip(shape, cuts, strict=True)
    ]
    return [
        (tuple(low for low, _ in box), tuple(high - low for low, high in box))
        for box in itertools.product(*ranges)
    ]


def within(whole, start, size):
    return whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]


@examples(60)
@given(grid=grids(), data=st.data())
def test_any_part_is_read_from_any_parts(grid, data, tmp_path_factory):
    shape, cuts = grid
    folder = tmp_path_factory.mktemp("pieces")
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    parts = boxes(shape, cuts)
    pieces = []
    for part, (start, size) in enumerate(parts):
        extent = TensorExtent(dtype="float64", shape=shape, start=start, size=size)
        header = Header(
            identity=identity(), stage=0, part=part, num_parts=len(parts), tensors={"w": extent}
        )
        own = {"w": within(whole, start, size).clone()}
        pieces.append(CheckpointPiece.opened(write_piece(folder, header, own)))
    assert torch.equal(assembled("w", pieces, (0,) * len(shape), shape), whole)
    start = tuple(data.draw(st.integers(0, max(0, n - 1))) for n in shape)
    size = tuple(
        data.draw(st.integers(min(1, n), n - a)) for n, a in zip(shape, start, strict=True)
    )
    assert torch.equal(assembled("w", pieces, start, size), within(whole, start, size))
    # Copies of a part change nothing, and without one of the parts there is no whole.
    assert torch.equal(
        assembled("w", [*pieces, pieces[0]], start, size), within(whole, start, size)
    )
    if len(pieces) > 1 and whole.numel():
        with pytest.raises(FileError, match="do not hold all of 'w'"):
            assembled("w", pieces[1:], (0,) * len(shape), shape)


@examples(20)
@given(grid=grids(), data=st.data())
def test_nothing_is_read_that_is_not_asked_for(grid, data, tmp_path_factory):
    shape, cuts = grid
    parts = boxes(shape, cuts)
    start, size = data.draw(st.sampled_from(parts))
    read = []

    class Counting(CheckpointPiece):
        def read(self, name, own_start, own_size):
            read.append(math.prod(own_size))
            return super().read(name, own_start, own_size)

    folder = tmp_path_factory.mktemp("pieces")
    extent = TensorExtent(dtype="float32", shape=shape)
    header = Header(identity=identity(), stage=0, tensors={"w": extent})
    piece = Counting.opened(write_piece(folder, header, {"w": torch.zeros(shape)}))
    assembled("w", [piece], start, size)
    assert read == [math.prod(size)] * bool(math.prod(size))


@st.composite
def layouts(draw, num_layers=7):
    """A schedule on some ranks, cut anywhere."""
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v"]))
    ranks = draw(st.integers(2 if "v" in schedule or "inter" in schedule else 1, 3))
    stages = ranks * (2 if schedule in ("interleaved-1f1b", "zb-v") else 1)
    borders = st.permutations(range(1, num_layers)).map(lambda all: sorted(all[: stages - 1]))
    return {"num_ranks": ranks, "num_microbatches": 6, "schedule": schedule, "cuts": draw(borders)}


@examples(15)
@given(
    first=layouts(), second=layouts(), frozen=st.sets(st.sampled_from(["layer", "norm", "last"]))
)
def test_pieces_hold_everything_once_and_give_it_to_any_layout(
    first, second, frozen, tmp_path_factory
):
    runs = tmp_path_factory.mktemp("runs")

    def pipeline(layout):
        model = Tied()
        for name in frozen:
            getattr(model, name).requires_grad_(False)
        plan = make_plan(model, **layout)
        return pk.Pipeline(model, plan, loss=loss_of, optimizer=adamw, deadline_seconds=300), model

    trained, model = pipeline(first)
    with trained:
        trained.step(*batch(0))
        trained.save(runs / "first")
    checkpoint = checkpoint_in(runs / "first")
    held = {name: len(pieces) for name, pieces in checkpoint.pieces_with.items()}
    assert set(held.values()) == {1}
    assert set(model.state_dict()) == set(Contents(checkpoint).weights)
    stepped = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert {f"optimizer/{name}/exp_avg" for name in stepped} == {
        name for name in held if name.endswith("/exp_avg")
    }
    resumed, _ = pipeline(second)
    with resumed:
        resumed.load(runs / "first")
        resumed.save(runs / "second")
    assert_same_training(runs / "second", runs / "first", step=1)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["$tuple", "$float"]),
    lambda values: (
        st.lists(values, max_size=3)
        | st.lists(values, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), values, max_size=3)
        | st.dictionaries(st.sampled_from(["$tuple", "$x", "a"]), values, max_size=2)
    ),
    max_leaves=12,
)


@examples(200)
@given(value=PLAIN)
def test_plain_values_come_back_as_they_were(value):
    header = Header(identity=identity(position=to_json(value, "it")), stage=0, tensors={})
    again = of_json(Header.of_text(header.text(), "a head").identity.position)
    assert repr(again) == repr(value)


MARKS = st.sampled_from(["$tuple", "$map", "$counter", "$float", "$scalar", "$new", "a"])
CLAIMED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["inf", "float32"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(MARKS, values, max_size=2),
    max_leaves=8,
)


@examples(300)
@given(value=CLAIMED)
def test_what_a_file_claims_is_read_or_refused(value):
    with suppress(FileError):
        of_json(value)


def test_nesting_has_an_end():
    value = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(FileError, match="too deeply"):
        of_json(value)
