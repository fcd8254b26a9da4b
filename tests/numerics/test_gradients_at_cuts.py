"""What wants no gradient on one device wants none behind a cut, however it got there.

Kernels are chosen by that: with a mask that wanted a gradient, attention took another kernel in all
stages but the first, and summed in another order.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from tests.kit.helpers import Lambda, make_batch, make_plan
from tests.kit.live import Given, differences, live_plan, pushed, replayed, stream_of, weights_apart
from tests.kit.masked import WIDTH, masked_batch, masked_encoder
from tests.kit.one_device import OneDevice, assert_same
from tests.kit.training import DEADLINE_SECONDS, pipeline_of, sgd

SEEN_ON_ONE_DEVICE = [{(False, False)}, *[{(True, False)}] * 3]
"""By layer, whether (value, mask) want gradients."""


def trained_beside(ours, batches, schedule="1f1b", num_ranks=2, recompute="none", **options):
    """Train a model in a pipeline and its twin on one device; both must be equal to the bit."""
    theirs = copy.deepcopy(ours)
    one = OneDevice(theirs, 4, F.cross_entropy, sgd)
    expected = [one.step(*batch) for batch in batches]
    with pipeline_of(
        ours, schedule, num_ranks, optimizer=sgd, recompute=recompute, **options
    ) as pipeline:
        losses = [pipeline.step(*batch) for batch in batches]
        with torch.no_grad():
            outputs = [theirs.eval()(part) for part in one.cut(batches[0][0])]
        assert torch.equal(pipeline.evaluate(batches[0][0]), torch.cat(outputs))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert_same(ours, theirs)


@pytest.mark.parametrize("recompute", ["none", "stage", "layers"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_a_padding_mask_is_trained_nowhere(schedule, recompute, monkeypatch):
    masks, attend = [], F.scaled_dot_product_attention

    def noted(*given, **named):
        masks.append(given[3] if len(given) > 3 else named["attn_mask"])
        return attend(*given, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    model = masked_encoder()
    trained_beside(model, [masked_batch(seed=step) for step in range(3)], schedule, 2, recompute)
    assert [set(layer.seen) for layer in model[:-1]] == SEEN_ON_ONE_DEVICE
    assert masks
    assert not any(mask.requires_grad for mask in masks)


class Leaves(nn.Module):
    """Lets the mask travel beside the chain."""

    stashes = ("mask_0",)

    def forward(self, pair):
        return pair[0], {"mask_0": pair[1]}


class Masked(nn.TransformerEncoderLayer):
    """Takes the mask that the layer before has left, and leaves it for the next."""

    def __init__(self, index):
        super().__init__(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.recalls, self.stashes = (f"mask_{index}",), (f"mask_{index + 1}",)

    def forward(self, value, **masks):
        (mask,) = masks.values()
        assert not mask.requires_grad
        return super().forward(value, src_key_padding_mask=mask), {self.stashes[0]: mask}


class Drops(nn.Module):
    recalls = ("mask_3",)

    def forward(self, value, mask_3):
        assert not mask_3.requires_grad
        return value.mean(1)


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_a_mask_that_is_a_skip_is_trained_nowhere(recompute):
    torch.manual_seed(0)
    layers = [Masked(index) for index in range(3)]
    ours = nn.Sequential(Leaves(), *layers, Drops(), nn.Linear(WIDTH, 4))
    batches = [masked_batch(seed=step) for step in range(3)]
    trained = []
    for num_ranks in (1, 3):
        model = copy.deepcopy(ours)
        with pipeline_of(model, num_ranks=num_ranks, optimizer=sgd, recompute=recompute) as one:
            trained.append((model, torch.stack([one.step(*batch) for batch in batches])))
    (theirs, expected), (split, losses) = trained
    assert torch.equal(losses, expected)
    assert_same(split, theirs)


class Encoder(nn.Module):
    """As ``masked_encoder``, written as people write it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, pair):
        value, mask = pair
        for layer in self.layers:
            value = layer(value, src_key_padding_mask=mask)
        return self.head(value).mean(1)


def test_a_captured_encoder_with_a_mask_is_that_of_one_device():
    torch.manual_seed(0)
    theirs = Encoder()
    ours = copy.deepcopy(theirs)
    batches = [masked_batch(seed=step) for step in range(3)]
    one = OneDevice(theirs, 4, F.cross_entropy, sgd)
    expected = [one.step(*batch) for batch in batches]
    captured = pk.capture(ours, masked_batch(2)[0], granularity="block")
    with pipeline_of(captured, num_ranks=3, optimizer=sgd) as pipeline:
        losses = [pipeline.step(*batch) for batch in batches]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert_same(ours, theirs)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_first_stages_that_are_frozen_send_nothing_back_and_nobody_waits(schedule, recompute):
    torch.manual_seed(0)
    seen = []

    def note(value, linear):
        seen.append(value.requires_grad)
        return linear(value)

    layers = [nn.Linear(16, 16).requires_grad_(False) for _ in range(6)]
    ours = nn.Sequential(*layers, Lambda(note, nn.Linear(16, 16)), nn.Linear(16, 4))
    trained_beside(ours, [make_batch(8, seed=step) for step in range(3)], schedule, 2, recompute)
    assert not any(seen)


def sometimes(value):
    """Of some microbatches nothing behind it can train what is before it."""
    return value if value.detach()[0, 0] > 0 else value.detach()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("recompute", ["none", "stage", "layers"])
def test_microbatches_may_differ_in_what_wants_a_gradient(schedule, recompute):
    torch.manual_seed(0)
    seen = []

    def note(value, linear):
        seen.append(value.requires_grad)
        return linear(value)

    ours = nn.Sequential(
        nn.Linear(16, 16), Lambda(sometimes), Lambda(note, nn.Linear(16, 16)), nn.Linear(16, 4)
    )
    batches = [make_batch(8, seed=step) for step in range(4)]
    cuts = [1, 2, 3] if schedule == "zb-v" else [2]
    trained_beside(ours, batches, schedule, 2, recompute, cuts=cuts)
    assert set(seen) == {True, False}


class Beside(nn.Module):
    """A layer beside which something passes that is not trained."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width).double()
        self.seen = []

    def forward(self, pair):
        value, scale = pair
        self.seen.append(scale.requires_grad)
        return torch.tanh(self.linear(value) * scale), scale


def test_a_stream_equals_the_recurrence_where_a_part_of_frames_is_not_trained():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(*[Beside(4) for _ in range(3)], Lambda(lambda pair: pair[0]))

    generator = torch.Generator().manual_seed(2)
    frames = [
        Given(
            tuple(torch.randn(2, 4, generator=generator, dtype=torch.float64) for _ in range(2)),
            torch.randn(2, 4, generator=generator, dtype=torch.float64),
        )
        for _ in range(9)
    ]
    model = build()
    plan = live_plan(model, 3)
    with stream_of(model, plan) as stream:
        results = pushed(stream, frames)
    seen, reference, _ = replayed(plan, frames, build())
    assert not any(any(layer.seen) for layer in [*model[:-1], *reference[:-1]])
    assert not differences(results, seen)
    assert not weights_apart(model, reference)
    assert not any(result.output.requires_grad for result in results)


def test_outputs_of_frames_that_nobody_labels_want_no_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    with stream_of(model, live_plan(model, 2)) as stream:
        results = pushed(stream, [Given(torch.ones(1, 4, dtype=torch.float64))] * 4)
    assert len(results) == 4
    assert not any(result.output.requires_grad for result in results)


def test_asynchronous_versions_leave_a_mask_alone():
    model = masked_encoder()
    plan = make_plan(model, 2, 4, "pipedream-2bw")
    with pk.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=sgd, deadline_seconds=DEADLINE_SECONDS
    ) as pipeline:
        list(pipeline.steps([masked_batch(seed=step) for step in range(3)]))
    assert [set(layer.seen) for layer in model[:-1]] == SEEN_ON_ONE_DEVICE
