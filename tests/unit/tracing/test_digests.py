"""What processes compare of what they have traced."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import ModelError
from penstock.engine.run.drive.offers import _other_graph
from penstock.engine.tracing.entrance import as_planned

INPUTS = torch.randn(3, 6)


class Net(nn.Module):
    """Has in its graph what no weight tells of."""

    def __init__(self, scale=0.5, chunks=2, kind=torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.scale, self.chunks, self.kind = scale, chunks, kind
        self.shift = torch.tensor([1])  # a constant of the graph

    def forward(self, value):
        value = F.relu(self.first(value)).to(self.kind).float() + self.shift
        left, *_, right = self.second(value).chunk(self.chunks, -1)
        return value + self.scale * torch.cat([left, right] * (self.chunks // 2), -1)


def traced_as(model, inputs=INPUTS):
    return digests_of(pk.capture(model, inputs, verify=False))


def digests_of(captured):
    return {layer.spine_name: layer.traced_as for layer in captured.spine()}


def test_the_same_model_is_traced_alike_with_other_weights_rows_and_numbers():
    model = Net()
    expected = traced_as(model)
    assert len({*expected.values()}) == len(expected) == 2
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.first.weight.mul_(2)
    assert traced_as(model) == traced_as(other, torch.zeros(7, 6)) == expected


@pytest.mark.parametrize(
    ("options", "odd"),
    [
        ({"scale": 0.25}, {"second"}),
        ({"chunks": 4}, {"second"}),
        ({"kind": torch.bfloat16}, {"first"}),
    ],
)
def test_what_is_in_the_graph_alone_tells_models_apart(options, odd):
    ours, theirs = traced_as(Net()), traced_as(Net(**options))
    assert {name for name in ours if ours[name] != theirs[name]} == odd


def test_whoever_has_the_plan_from_a_file_traces_as_who_has_profiled():
    model = Net()
    plan = pk.plan(pk.profile(model, INPUTS), pk.Cluster.local(2), microbatches=2)
    expected = digests_of(as_planned(model, plan))
    with torch.device("meta"):
        on_meta = Net()
    on_meta.shift = model.shift  # what is no state of a model is nowhere else
    for other in (copy.deepcopy(model), on_meta):
        assert digests_of(as_planned(other, plan)) == expected


def test_the_first_rank_and_layer_that_differ_are_named_and_others_counted():
    first = {"a": "1", "b": "2", "c": "3"}
    error = _other_graph([first, first, {**first, "b": "4", "c": "5"}])
    assert isinstance(error, ModelError)
    assert str(error).startswith(
        "rank 2 has traced layer 'b' to another graph than rank 0 (and 1 more layer), so stages"
    )
    assert "'a'" in str(_other_graph([first, {}]))
