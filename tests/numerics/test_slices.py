"""Schedules with slices of the sequence train real modules, with the results of one device.

One device runs whole sequences, so sums have another order: float64 shows that no more differs.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.base.errors import InputError, ModelError, StageError
from penstock.core.schedule import Kind, Op, Schedule, families
from penstock.core.schedule.families.straight import seq1f1b
from penstock.core.schedule.lower import split_backward
from penstock.demo import GPT, loss
from penstock.engine.model.spine import run_spine
from tests.kit.helpers import make_plan
from tests.kit.one_device import OneDevice, assert_same, assert_same_gradients
from tests.kit.training import adamw, momentum
from tests.numerics.test_one_logical_model_shared import TiedGPT, token_batch

VOCABULARY, CONTEXT = 13, 11


def build_gpt(dropout=0.0, layers=4):
    torch.manual_seed(0)
    model = GPT(
        vocabulary=VOCABULARY, width=16, heads=2, layers=layers, context=CONTEXT, dropout=dropout
    )
    for parameter in model.parameters():  # attention that attends to something
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def plan_of(model, num_ranks, num_microbatches, num_slices, name="seq1f1b", recompute="none"):
    plan = make_plan(model, num_ranks, num_microbatches, name, recompute=recompute)
    return replace(plan, options={"num_slices": num_slices})


def tokens(rows=5, length=CONTEXT, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCABULARY, (2, rows, length), generator=generator))


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 5])
@pytest.mark.parametrize(("num_ranks", "num_slices"), [*product([2, 4], [2, 4])])
def test_loss_and_gradients_are_those_of_one_device(num_ranks, num_slices, num_microbatches):
    model = build_gpt()
    twin = copy.deepcopy(model)
    inputs, targets = tokens()
    plan = plan_of(model, num_ranks, num_microbatches, num_slices)
    with pk.Pipeline(model, plan, loss=loss) as pipeline:
        ours = pipeline.step(inputs, targets)
        assert pipeline.timeline.num_ranks == num_ranks
    theirs = OneDevice(twin, num_microbatches, loss).step(inputs, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same_gradients(model, twin, 1e-12)
    assert max(parameter.grad.abs().max() for parameter in model.parameters()) > 1e-2


@pytest.mark.parametrize(
    ("num_ranks", "num_slices", "num_microbatches"), [(2, 2, 4), (2, 4, 1), (4, 4, 2)]
)
@pytest.mark.parametrize("post_validate", [False, True])
def test_several_steps_with_ragged_minibatches_and_sequences(
    num_ranks, num_slices, num_microbatches, post_validate
):
    model = build_gpt()
    twin = copy.deepcopy(model)
    reference = OneDevice(twin, num_microbatches, loss, adamw, clip_norm=0.5)
    plan = plan_of(model, num_ranks, num_microbatches, num_slices)
    with pk.Pipeline(
        model, plan, loss=loss, optimizer=adamw, clip_norm=0.5, post_validate=post_validate
    ) as pipeline:
        for step, (rows, length) in enumerate([(7, 11), (4, 8), (1, 5), (9, 11)]):
            batch = tokens(rows, length, step)
            ours, theirs = pipeline.step(*batch), reference.step(*batch)
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        for length in (11, 6):
            inputs, _ = tokens(6, length, 9)
            outputs = pipeline.evaluate(inputs)
            torch.testing.assert_close(outputs, twin.eval()(inputs), rtol=1e-9, atol=1e-9)
    assert_same(model, twin, 1e-10)


GROUP_SPLITS = {
    "embedding.tokens": "row",
    "blocks.0": "data",
    "blocks.2": "sequence",
    "blocks.*.attention.queries_keys_values": "column/3",
    "blocks.*.attention.project": "row",
    "blocks.*.mlp.expand": "column",
    "blocks.*.mlp.project": "row",
    "head.logits": "column",
}


def test_tensor_ranks_carry_their_part_from_slice_to_slice():
    """Keys and values of a member's heads stay with it, whatever lies around the attention."""
    model = build_gpt()
    twin = copy.deepcopy(model)
    reference = OneDevice(twin, 3, loss, momentum)
    plan = plan_of(model, 2, 3, 2).with_tensor_split(2, GROUP_SPLITS)
    with pk.Pipeline(model, plan, loss=loss, optimizer=momentum) as pipeline:
        for step, length in enumerate((11, 8)):
            batch = tokens(6, length, step)
            ours, theirs = pipeline.step(*batch), reference.step(*batch)
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same(model, twin, 1e-12)


@pytest.mark.parametrize("recompute", ["stage", "layers"])
def test_with_recomputation(recompute):
    model = build_gpt()
    twin = copy.deepcopy(model)
    batch = tokens()
    with pk.Pipeline(model, plan_of(model, 2, 3, 3, recompute=recompute), loss=loss) as pipeline:
        pipeline.step(*batch)
    OneDevice(twin, 3, loss).step(*batch)
    assert_same_gradients(model, twin, 1e-12)


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_with_a_split_backward(monkeypatch, recompute):
    def split(num_ranks, num_microbatches, num_slices=2):
        return split_backward(seq1f1b(num_ranks, num_microbatches, num_slices))

    monkeypatch.setitem(families.FAMILIES, "seq1f1b-split", split)
    model = build_gpt()
    twin = copy.deepcopy(model)
    batch = tokens()
    plan = plan_of(model, 2, 3, 2, "seq1f1b-split", recompute)
    with pk.Pipeline(model, plan, loss=loss) as pipeline:
        pipeline.step(*batch)
        assert any(str(op)[1] == "W" for op in pipeline.timeline.rows[0].ops)
    OneDevice(twin, 3, loss).step(*batch)
    assert_same_gradients(model, twin, 1e-12)


class Down(nn.Module):
    """Leaves its input for two layers later."""

    by_position = True
    stashes = ("early",)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value):
        return self.linear(value), {"early": value}


class Up(nn.Module):
    """Mixes positions by a running sum, and takes what was left."""

    recalls = ("early",)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value, early):
        return self.forward_slice(value, None, early)[0]

    def forward_slice(self, value, total, early):
        sums = self.linear(value * early).cumsum(1) + (0 if total is None else total)
        return torch.tanh(sums), sums[:, -1:]


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Down(), nn.Linear(4, 4), nn.Tanh(), Up()])

    def spine(self):
        return list(self.layers)

    def forward(self, value):
        return run_spine(self.layers, value)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_skips_cross_stages_slice_by_slice(num_ranks):
    torch.manual_seed(0)
    model = Skipping().double()
    twin = copy.deepcopy(model)
    inputs, targets = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    with pk.Pipeline(model, plan_of(model, num_ranks, 2, 3), loss=F.mse_loss) as pipeline:
        ours = pipeline.step(inputs, targets)
    torch.testing.assert_close(ours, OneDevice(twin, 2, F.mse_loss).step(inputs, targets))
    assert_same_gradients(model, twin, 1e-12)


def test_skips_within_a_rank(monkeypatch):
    def stage_by_stage(num_ranks, num_microbatches, num_slices=3):
        pieces = [(k, part) for k in range(num_microbatches) for part in range(num_slices)]
        back = [(k, part) for k, part in pieces[::-1]]
        forwards = [Op(stage, Kind.FORWARD, *piece) for stage in range(3) for piece in pieces]
        backwards = [Op(stage, Kind.BACKWARD, *piece) for stage in (2, 1, 0) for piece in back]
        return Schedule.of([forwards + backwards])

    monkeypatch.setitem(families.FAMILIES, "stage-by-stage", stage_by_stage)
    torch.manual_seed(0)
    model = Skipping().double()
    twin = copy.deepcopy(model)
    batch = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    with pk.Pipeline(model, plan_of(model, 1, 2, 3, "stage-by-stage"), loss=F.mse_loss) as pipeline:
        pipeline.step(*batch)
    OneDevice(twin, 2, F.mse_loss).step(*batch)
    assert_same_gradients(model, twin, 1e-12)


def masked(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def num_terms(targets):
    return (targets != -100).sum()


@pytest.mark.parametrize("num_slices", [2, 4])
def test_padding_that_fills_whole_slices_counts_for_nothing(num_slices):
    model = build_gpt()
    twin = copy.deepcopy(model)
    inputs, targets = tokens(4, 8)
    targets[:, 5:] = -100
    targets[0] = -100
    plan = plan_of(model, 2, 4, num_slices)
    with pk.Pipeline(model, plan, loss=masked, weight=num_terms) as pipeline:
        ours = pipeline.step(inputs, targets)
    theirs = OneDevice(twin, 1, masked).step(inputs, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same_gradients(model, twin, 1e-12)


def test_a_sum_needs_no_weights():
    def total(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    model = build_gpt()
    twin = copy.deepcopy(model)
    batch = tokens(3)
    with pk.Pipeline(model, plan_of(model, 2, 2, 4), loss=total, reduction="sum") as pipeline:
        ours = pipeline.step(*batch)
    theirs = OneDevice(twin, 1, total).step(*batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same_gradients(model, twin, 1e-11)


def test_a_minibatch_that_is_cut_already_may_have_sequences_of_any_length():
    model = build_gpt()
    twin = copy.deepcopy(model)
    batches = [tokens(2, 11, 1), tokens(3, 4, 2), tokens(1, 7, 3)]
    inputs, targets = (pk.Microbatches(column) for column in zip(*batches, strict=True))
    metrics = {"mean": lambda logits, _: logits.mean()}
    with pk.Pipeline(model, plan_of(model, 2, 3, 3), loss=loss, metrics=metrics) as pipeline:
        ours = pipeline.step(inputs, targets)
        outputs = pipeline.evaluate(inputs)
        metric = pipeline.metrics["mean"]
    counts = [one.numel() for one in inputs]
    pairs = [(twin(a), b, c / sum(counts)) for a, b, c in zip(inputs, targets, counts, strict=True)]
    theirs = sum(loss(logits, wanted) * share for logits, wanted, share in pairs)
    theirs.backward()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metric, sum(one.mean() * share for one, _, share in pairs).detach())
    assert_same_gradients(model, twin, 1e-12)
    assert [tuple(one.shape) for one in outputs] == [(2, 11, 13), (3, 4, 13), (1, 7, 13)]
    for output, (logits, _, _) in zip(outputs, pairs, strict=True):
        torch.testing.assert_close(output, logits.detach(), rtol=1e-10, atol=1e-10)


def test_dropout_depends_on_the_seed_and_not_on_the_number_of_stages():
    losses, weights = [], []
    for num_ranks, seed in ((2, 3), (4, 3), (2, 3), (2, 4)):
        model = build_gpt(dropout=0.2)
        plan = plan_of(model, num_ranks, 2, 2)
        with pk.Pipeline(model, plan, loss=loss, optimizer=adamw, seed=seed) as pipeline:
            losses.append([pipeline.step(*tokens(seed=step)) for step in range(3)])
        weights.append(model.state_dict())
    for other in (1, 2):
        assert torch.equal(torch.stack(losses[0]), torch.stack(losses[other]))
        assert all(torch.equal(weights[0][key], weights[other][key]) for key in weights[0])
    assert not torch.equal(losses[0][0], losses[3][0])


def test_tied_weights():
    model = TiedGPT()
    twin = copy.deepcopy(model)
    reference = OneDevice(twin, 2, loss, adamw)
    with pk.Pipeline(model, plan_of(model, 2, 2, 2), loss=loss, optimizer=adamw) as pipeline:
        for step in range(3):
            batch = token_batch(seed=step)
            ours, theirs = pipeline.step(*batch), reference.step(*batch)
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert_same(model, twin, 1e-10)


@pytest.mark.parametrize("num_slices", [2, 4])
def test_counted_peaks_are_near_the_predicted_ones(num_slices):
    """A slice keeps the keys and values of all before it, so later ones keep more than a share."""
    length = 64
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, width=32, heads=2, layers=4, context=length)
    batch = tokens(8, length)
    graph = pk.profile(model, batch[0][:1], loss=loss, targets=batch[1][:1], repeats=1, ranks=0)
    plan = plan_of(model, 2, 8, num_slices)
    by_name = {layer.name: layer.activation_bytes for layer in graph.layers}
    stages = tuple(
        replace(stage, activation_bytes=sum(by_name[name] for name in stage.layers))
        for stage in plan.stages
    )
    plan = replace(plan, stages=stages)
    with pk.Pipeline(model, plan, loss=loss, count_memory=True) as pipeline:
        pipeline.step(*batch)
        peaks, timeline = pipeline.peaks, pipeline.timeline
    assert [peak.microbatches for peak in peaks] == list(timeline.peak_activations)
    for peak, predicted in zip(peaks, timeline.peak_bytes(plan.sizes), strict=True):
        assert 0.95 * predicted < peak.activation_bytes < 1.5 * predicted


def test_layers_that_cannot_be_sliced_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(5, 5, 1), nn.Linear(4, 4), nn.Tanh())
    plan = plan_of(model, 2, 2, 2)
    with pytest.raises(ModelError, match=r"layer '1' \(Conv1d\) does not say how it works"):
        pk.Pipeline(model, plan, loss=F.mse_loss)
    with pk.Pipeline(model, plan_of(model, 2, 2, 1), loss=F.mse_loss) as pipeline:
        pipeline.step(torch.ones(2, 5, 4), torch.ones(2, 5, 4))  # 1F1B


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (torch.ones(4, 6, 4), torch.ones(4), r"targets cannot be cut.*shapes are \(2,\)"),
        (
            (torch.ones(4, 6, 4), torch.ones(4, 3)),
            torch.ones(4, 6),
            r"inputs cannot be cut.*shapes are \(2, 6, 4\), \(2, 3\)",
        ),
        (torch.ones(4, 2, 4), torch.ones(4, 2), "inputs have 2 positions, which do not make 3 sl"),
        (torch.ones(4, 6, 4), torch.ones(4, 5), "inputs have 6 positions, but targets have 5"),
    ],
)
def test_what_cannot_be_cut_is_refused(inputs, targets, message):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with (
        pk.Pipeline(model, plan_of(model, 2, 2, 3), loss=F.mse_loss) as pipeline,
        pytest.raises(InputError, match=message),
    ):
        pipeline.step(inputs, targets)


def test_outputs_without_positions_cannot_be_joined():
    class Sum(nn.Module):
        by_position = True  # it is not

        def forward(self, value):
            return value.sum((1, 2))

    model = nn.Sequential(nn.Linear(4, 4), Sum())
    with (
        pk.Pipeline(model, plan_of(model, 2, 2, 2)) as pipeline,
        pytest.raises(InputError, match="an output is a tensor without positions; slices cannot"),
    ):
        pipeline.evaluate(torch.ones(4, 6, 4))


def test_an_error_names_the_slice_and_the_same_step_may_be_tried_again():
    class Failing(nn.Linear):
        by_position = True
        calls = 0

        def forward(self, value):
            self.calls += 1
            if self.calls == 5:
                raise ValueError("once")
            return super().forward(value)

    model = nn.Sequential(nn.Linear(4, 4), Failing(4, 4))
    twin = copy.deepcopy(model)
    inputs, targets = torch.randn(2, 4, 6, 4)
    with pk.Pipeline(model, plan_of(model, 2, 2, 3), loss=F.mse_loss, optimizer=adamw) as pipeline:
        with pytest.raises(StageError, match=r"microbatch 1, op 1F1\.1: ValueError: once"):
            pipeline.step(inputs, targets)
        ours = pipeline.step(inputs, targets)
    torch.testing.assert_close(ours, F.mse_loss(nn.Sequential.forward(twin, inputs), targets))


def test_the_planner_gives_slices_only_when_asked():
    model = build_gpt()
    inputs, targets = tokens()
    graph = pk.profile(model, inputs, loss=loss, targets=targets, repeats=1, ranks=0)
    # With one microbatch, nothing else would let two ranks work at the same time.
    devices = tuple(pk.Device(name=name) for name in "ab")
    cluster = pk.Cluster(devices=devices, link=pk.Link(latency_seconds=0.0))
    assert pk.plan(graph, cluster, microbatches=1).build_schedule().num_slices == 1
    asked = pk.plan(graph, cluster, microbatches=1, schedule="seq1f1b", stages=2)
    assert asked.build_schedule().num_slices == 2
    twin = copy.deepcopy(model)
    with pk.Pipeline(model, asked, loss=loss) as pipeline:
        pipeline.step(inputs, targets)
    OneDevice(twin, 1, loss).step(inputs, targets)
    assert_same_gradients(model, twin, 1e-12)
