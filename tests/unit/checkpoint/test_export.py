"""Weights that are given to a pipeline under the model's keys: all of them, or none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from penstock.base.errors import InputError
from penstock.engine.tensor.group import ShardSpec
from penstock.training.checkpoint.export import _chunk, _Own, _put
from tests.kit.groups import together
from tests.kit.helpers import make_mlp
from tests.kit.training import adamw, pipeline_of


def state_of(seed):
    return {key: value.clone() for key, value in make_mlp(seed=seed).state_dict().items()}


def test_whole_tensors_are_taken_and_what_nobody_needs_is_left():
    wanted = state_of(7)
    with pipeline_of(model := make_mlp(), optimizer=adamw) as pipeline:
        pipeline.load_dtensor_state_dict({**wanted, "more": torch.ones(1)})
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted[key])


WRONG = {
    "a key is missing": (lambda state: state.pop("3.bias"), r"the state lacks '3\.bias'; give all"),
    "no tensor": (lambda state: state.update({"3.bias": 3}), r"the state has 3 as '3\.bias'; give"),
    "another shape": (
        lambda state: state.update({"5.weight": torch.zeros(4, 31)}),
        r"has '5\.weight' of shape \(4, 31\), and the model of shape \(4, 32\); build the model",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_named_and_changes_nothing(wrong):
    spoil, told = WRONG[wrong]
    spoil(state := state_of(7))
    before = state_of(0)
    with (
        pipeline_of(model := make_mlp(), optimizer=adamw) as pipeline,
        pytest.raises(InputError, match=told),
    ):
        pipeline.load_dtensor_state_dict(state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_one_process_gives_copies_of_whole_tensors():
    with pipeline_of(model := make_mlp(), optimizer=adamw) as pipeline:
        given = pipeline.dtensor_state_dict()
        assert given.keys() == model.state_dict().keys()
        given["3.bias"].add_(1)
        assert torch.equal(model[3].bias, state_of(0)["3.bias"])


DIVIDED = {
    "as it comes": ShardSpec(0),
    "columns": ShardSpec(1),
    "three blocks": ShardSpec(0, blocks=3),
    "heads": ShardSpec(0, unit=3),
}


@pytest.fixture
def mesh():
    """Of one process: what a member has of a value is all that there is here."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", torch.tensor([[0]]), mesh_dim_names=("data", "tensor"))
    dist.destroy_process_group()


@pytest.mark.parametrize("cut", DIVIDED.values(), ids=DIVIDED)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_members_parts_become_those_of_torch_and_come_back(cut, size, mesh):
    """Fifteen rows and seven columns divide by few of these numbers."""
    whole = torch.arange(15 * 7.0).reshape(15, 7)

    def member(group):
        expected = cut.part(whole, size, group.index)
        own = _Own("weight", expected.clone(), tuple(whole.shape), cut)
        chunk = _chunk(own, group).clone()
        taken = []
        placements = [Replicate(), Shard(cut.dim)]
        for given in (whole, DTensor.from_local(chunk, mesh, placements, run_check=False)):
            own.value.zero_()
            _put(given, own, group)
            taken.append(torch.equal(own.value, expected))
        return chunk, all(taken)

    chunks, right = zip(*together(size, member), strict=True)
    assert all(right)
    theirs = whole.chunk(size, cut.dim)
    assert all(map(torch.equal, chunks, theirs))
    assert all(not chunk.numel() for chunk in chunks[len(theirs) :])


def test_who_shares_nothing_takes_the_whole():
    whole = torch.arange(6.0)
    for cut in (None, ShardSpec(0)):
        own = _Own("bias", torch.zeros(6), (6,), cut)
        _put(whole, own, None)
        assert torch.equal(own.value, whole)
