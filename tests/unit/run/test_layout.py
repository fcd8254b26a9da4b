"""Which rank holds what: weights with several users, twins, skips, what the optimizer gets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.base.errors import ModelError
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.run.layout import Layout
from penstock.engine.run.rank.program import SkipRoute
from tests.kit.helpers import make_mlp, make_plan
from tests.numerics.test_one_logical_model_shared import TiedGPT, UNet


def layout_of(model, schedule="1f1b", num_ranks=2, one_process=True):
    plan = make_plan(model, num_ranks, 4, schedule)
    devices = dict.fromkeys(range(num_ranks), torch.device("cpu"))
    streams = LayerStreams(0)
    return Layout(model, plan, spine_of(model), streams, one_process=one_process, devices=devices)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved-1f1b", "chimera"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("one_process", [True, False])
def test_every_weight_is_told_once_and_held_once_per_rank(schedule, num_ranks, one_process):
    model = TiedGPT()
    layout = layout_of(model, schedule, num_ranks, one_process)
    told = []
    for rank in range(num_ranks):
        holdings = layout.holdings(rank, stages := layout.stages(rank))
        held = [name for one in holdings.values() for name in one.named]
        assert len(held) == len(set(held))
        own = {id(parameter) for stage in stages.values() for parameter in stage.parameters()}
        assert {id(p) for one in holdings.values() for p in one.named.values()} == own
        told += [place for one in holdings.values() for place in one.counted]
    assert sorted(told) == list(range(len(list(model.parameters()))))


def test_threads_have_twins_of_shared_weights_and_processes_do_not_need_them():
    model = TiedGPT()
    own = {id(parameter) for parameter in model.parameters()}
    for one_process in (True, False):
        layout = layout_of(model, one_process=one_process)
        first, last = layout.stages(0), layout.stages(1)
        assert {id(p) for p in first[0].parameters()} <= own
        foreign = [p for p in last[1].parameters() if id(p) not in own]
        assert len(foreign) == one_process
    assert layout.weights.shared_stages == {0, 1}


def test_both_ends_on_one_rank_share_without_messages():
    layout = layout_of(TiedGPT(), "zb-v")
    assert layout.weights.shared_stages == frozenset()
    assert layout.weights.updating_tied_weights == {0}  # the other stage updates when it can
    assert layout.shared(0, layout.stages(0)) == []
    assert not layout_of(make_mlp()).weights.updating_tied_weights


def test_twins_follow_the_weights_the_mode_and_what_is_frozen():
    model = TiedGPT()
    layout = layout_of(model)
    layout.stages(0)
    (head,) = [one.module for one in layout.stages(1)[1].layers if one.name == "head"]
    assert head.logits.weight is not model.head.logits.weight
    with torch.no_grad():
        model.embedding.tokens.weight.data.fill_(3.0)
    model.eval()
    model.embedding.requires_grad_(False)
    layout.follow()
    assert head.logits.weight.eq(3.0).all()
    assert not head.training
    assert not head.logits.weight.requires_grad
    assert head.norm.weight is model.head.norm.weight  # what is not shared stays the model's own


def test_skips_within_a_stage_take_no_route():
    assert layout_of(UNet(), num_ranks=1).skips == ()
    routes = layout_of(UNet(), num_ranks=2).skips
    assert routes == tuple(SkipRoute(f"level_{2 - k}", 0, 1, k) for k in range(3))


def test_statistics_of_stages_with_copies_are_refused():
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4))
    with pytest.raises(ModelError, match=r"chimera runs '1' \(BatchNorm1d\) on ranks \[0, 1\]"):
        layout_of(model, "chimera")
