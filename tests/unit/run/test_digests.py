"""What ranks compare of their minibatches, and what an error says of a difference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.base.errors import RunError
from penstock.engine.run.digests import (
    Call,
    CallDigest,
    Modes,
    Next,
    autocast_codes,
    check_alike,
    data_digest,
    modes_of,
)
from penstock.engine.transport.base import NOTE_BYTES

STEP = CallDigest(Call.STEP, inputs=5, targets=7)
LOOP = STEP._replace(call=Call.LOOP)


def told(own, other):
    """What two ranks are told, from the point of view of each."""
    texts = []
    for ranks, digests in (((0, 1), (own, other)), ((1, 0), (other, own))):
        with pytest.raises(RunError) as error:
            check_alike(digests[0].packed(), digests[1].packed(), ranks, "here")
        texts.append(str(error.value))
    return texts


def test_a_digest_is_a_note_and_comes_back():
    assert len(STEP.packed()) == NOTE_BYTES
    full = CallDigest(Call.LOOP, True, 1, 2, 2**32 - 1, 10**9, 0.5, 2**33, 2**33)
    assert CallDigest.unpacked(full.packed()) == full


@pytest.mark.parametrize("other", [STEP, LOOP, STEP._replace(inputs=0, targets=0, modes=1)])
def test_what_comes_to_the_same_is_no_difference(other):
    check_alike(STEP.packed(), other.packed(), (0, 1), "here")


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (
            {"cpu_autocast": 1},
            ("autocast of cpu is off on rank 0, but bfloat16 on rank 1",
             "autocast of cpu is bfloat16 on rank 1, but off on rank 0"),
        ),
        (
            {"device_autocast": 5},
            ("autocast of the accelerator is off on rank 0, but another dtype on rank 1",
             "autocast of the accelerator is another dtype on rank 1, but off on rank 0"),
        ),
        (
            {"modes": Modes.EVALUATION},
            ("the layers are in training mode on rank 0, but in evaluation mode on rank 1",
             "the layers are in evaluation mode on rank 1, but in training mode on rank 0"),
        ),
        (
            {"modes": 77},
            ("the layers are in training mode on rank 0, but partly in evaluation mode on rank 1",
             "the layers are partly in evaluation mode on rank 1, but in training mode on rank 0"),
        ),
        (
            {"call": Call.GATHER},
            ("rank 0 calls step(), but rank 1 gather_state_dict()",
             "rank 1 calls gather_state_dict(), but rank 0 step()"),
        ),
        (
            {"call": Call.LOOP, "behind": Next.MINIBATCH},
            2 * ("rank 0 calls step(), but rank 1 is in a loop over steps() that goes on",),
        ),
    ],
)  # fmt: skip
def test_each_rank_is_told_what_both_do(change, messages):
    own = STEP._replace(modes=Modes.TRAINING)
    for text, message in zip(told(own, own._replace(**change)), messages, strict=True):
        assert text.startswith(f"here: {message}")


def test_who_ends_a_loop_is_named_to_both():
    for text in told(LOOP, LOOP._replace(behind=Next.MINIBATCH)):
        assert "rank 0 ends its loop with this minibatch, but rank 1 goes on" in text
    judged = CallDigest(Call.EVALUATE)
    for text in told(judged, judged._replace(behind=Next.MINIBATCH)):
        assert "rank 0 ends its evaluation with this minibatch, but rank 1 goes on" in text


@pytest.mark.parametrize("other", [Next.NOTHING, Next.MINIBATCH])
def test_whose_loader_has_raised_is_named_to_both(other):
    for text in told(LOOP._replace(behind=Next.LOADER_ERROR), LOOP._replace(behind=other)):
        assert "the loader of rank 0 has raised" in text
        assert "not that of rank 1" in text


def test_codes_of_autocast():
    assert autocast_codes({}) == (0, 0)
    codes = [
        autocast_codes({kind: dtype})
        for kind in ("cpu", "cuda")
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2)
    ]
    assert len({*codes}) == len(codes)


def test_modes_tell_every_module():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))
    assert modes_of([]) == Modes.NOT_COMPARED
    assert modes_of(model.modules()) == Modes.TRAINING
    found = set()
    for module in model:
        model.train()
        module.eval()
        found.add(modes_of(model.modules()))
    assert len(found) == 2
    assert min(found) >= len(Modes)
    assert modes_of(model.eval().modules()) == Modes.EVALUATION


class Relabelled(torch.Tensor):
    """The same numbers in a class of its own."""


@pytest.mark.parametrize("shape", [(), (7,), (40, 50), (30, 4, 50), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.complex64])
def test_a_digest_does_not_depend_on_how_the_numbers_are_held(shape, dtype):
    tensor = torch.randint(-9, 9, shape).to(dtype)
    transposed = tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
    with_gaps = torch.stack([tensor, tensor + 1], dim=-1)[..., 0]
    ways = [transposed, with_gaps, tensor.as_subclass(Relabelled)]
    if dtype.is_complex:
        ways.append(tensor.conj().resolve_conj().conj())
    assert {data_digest(way) for way in ways} == {data_digest(tensor)}


def test_a_digest_looks_through_a_negative_view():
    numbers = torch.randn(5)
    negative = torch.complex(numbers, -numbers).conj().imag
    assert negative.is_neg()
    assert data_digest(negative) == data_digest(numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digests_of_different_data_differ(dtype):
    tensor = torch.arange(6.0).view(2, 3).to(dtype)
    others = [tensor.view(3, 2), tensor + 1, tensor.double(), tensor.mT]
    assert len({data_digest(other) for other in [tensor, *others]}) == 5
