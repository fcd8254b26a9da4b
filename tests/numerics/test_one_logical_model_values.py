"""What goes through the model: nested and ragged values, changing shapes, dropout, batch norm,
autocast, recomputation, training and evaluation mode. Against one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import InputError
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import crossed
from tests.kit.helpers import (
    Lambda,
    make_batch,
    make_mlp,
    make_plan,
    runnable_families,
    same_order_families,
)
from tests.kit.one_device import OneDevice, assert_same, assert_same_gradients, same
from tests.kit.training import adamw, pipeline_of

TOLERANCE = 1e-12
SHAPES = ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"]
RECOMPUTED = ("none", "stage", "layers")


class Passing(nn.Module):
    """Passes on a dictionary with a list, a tuple, a number, a text, a mask and nothing."""

    def __init__(self, last=False):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.last = last

    def forward(self, value):
        if not isinstance(value, dict):
            values, mask = value
            value = {"hidden": [values, (values, None)], "mask": mask, "scale": 2, "name": "x"}
        assert value["name"] == "x"
        assert value["hidden"][1][1] is None
        hidden, (first, _) = value["hidden"]
        hidden = torch.tanh(self.linear(hidden)) * value["scale"]
        hidden = hidden.masked_fill(value["mask"], 0.0)
        if self.last:
            return {"logits": hidden + first, "extra": (None, first.sum(-1))}
        return {**value, "hidden": [hidden, (first, None)]}


class PassingChain(nn.Sequential):
    """Needs a list of its own: the first input is a tuple."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(*(Passing(last=layer == 4) for layer in range(5)))


def nested_loss(output, targets):
    assert targets["note"] is None
    return F.cross_entropy(output["logits"], targets["rows"][0]) + output["extra"][1].mean()


def nested_batch(rows, seed):
    inputs, targets = make_batch(rows, seed=seed)
    return (inputs, inputs > 1), {"rows": [targets], "note": None}


@pytest.mark.parametrize("schedule", same_order_families())
def test_dictionaries_tuples_numbers_and_nothing_pass_between_stages(schedule):
    ours = PassingChain()
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, 4, nested_loss, adamw)
    with pipeline_of(ours, schedule, loss=nested_loss, optimizer=adamw) as pipeline:
        for step, rows in enumerate([13, 3, 8]):
            batch = nested_batch(rows, step)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
        inputs, _ = nested_batch(7, 9)
        outputs, expected = pipeline.evaluate(inputs), theirs.eval()(inputs)
        torch.testing.assert_close(outputs["logits"], expected["logits"].detach())
        assert outputs["extra"][0] is None
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("schedule", "num_ranks"),
    # Chimera wants an even number of ranks.
    [*crossed(same_order_families(), (1, 2, 3), thorough=SHAPES), ("chimera", 2)],
)
def test_any_number_of_rows_trains_and_evaluates(schedule, num_ranks):
    ours = nn.Sequential(*make_mlp(0.0, torch.float64), *(nn.Linear(4, 4) for _ in range(3)))
    ours = ours.double()
    theirs = copy.deepcopy(ours)
    tolerance = TOLERANCE if schedule == "chimera" else 0.0
    num_microbatches = 2 * num_ranks + 2
    reference = OneDevice(theirs, num_microbatches, optimizer=adamw)
    with pipeline_of(ours, schedule, num_ranks, num_microbatches, optimizer=adamw) as pipeline:
        for rows in [11, *range(1, 2 * num_ranks + 2), 12]:
            batch = make_batch(rows, torch.float64, seed=rows)
            assert same(pipeline.step(*batch), reference.step(*batch), tolerance), rows
            outputs = pipeline.evaluate(batch[0])
            torch.testing.assert_close(outputs, theirs(batch[0]).detach(), rtol=1e-10, atol=1e-12)
    assert_same(ours, theirs, 1e-11 if tolerance else 0.0)


@pytest.mark.parametrize(
    ("last", "joined"),
    [
        (lambda v: v.reshape(-1, 2), True),
        (lambda v: {"one": v, "two": v.reshape(-1, 1)}, True),
        (lambda v: v.t(), False),
        (lambda v: (v, v.amax(0, keepdim=True)), False),
        (lambda v: (v, v.mean(0)), False),
        (lambda v: v.mean(), False),
    ],
)
def test_outputs_whose_rows_are_not_those_of_the_inputs_are_those_of_one_device(last, joined):
    layers = [*make_mlp(0.0, torch.float64)[:5], nn.Linear(32, 6).double()]
    model = nn.Sequential(*layers, Lambda(last))
    sizes = []
    layers[0].register_forward_hook(lambda _, given, __: sizes.append(len(given[0])))
    with pipeline_of(model) as pipeline:
        for rows in (8, 11, 1, 12):
            inputs, _ = make_batch(rows, torch.float64, seed=rows)
            torch.testing.assert_close(pipeline.evaluate(inputs), model(inputs))
        sizes.clear()
        pipeline.evaluate(inputs)
    assert sizes == ([3, 3, 3, 3] if joined else [12])


def sequences():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)
    )


@pytest.mark.parametrize("schedule", same_order_families())
def test_shapes_may_change_from_step_to_step(schedule):
    ours, theirs = sequences(), sequences()
    reference = OneDevice(theirs, 4, F.mse_loss, adamw)
    with pipeline_of(ours, schedule, loss=F.mse_loss, optimizer=adamw) as pipeline:
        for rows, length in [(8, 3), (8, 200), (5, 1), (40, 7), (2, 300)]:
            inputs = torch.randn(rows, length, 4)
            batch = inputs, torch.zeros_like(inputs)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
            evaluated = pipeline.evaluate(inputs)
            torch.testing.assert_close(evaluated, theirs(inputs).detach())
    assert_same(ours, theirs)


@pytest.mark.parametrize("schedule", same_order_families())
def test_microbatches_may_differ_in_shape(schedule):
    # Buckets of sequences, packed so that no padding is computed.
    ours, theirs = sequences(), sequences()
    reference = OneDevice(theirs, 4, F.mse_loss, adamw)
    sizes = [(1, 9), (3, 2), (2, 30), (5, 1), (1, 4)]
    with pipeline_of(ours, schedule, loss=F.mse_loss, optimizer=adamw) as pipeline:
        for count in (4, 2, 5):
            parts = pk.Microbatches(torch.randn(*size, 4) for size in sizes[:count])
            before = [part.clone() for part in parts]
            targets = pk.Microbatches(torch.zeros_like(part) for part in parts)
            assert torch.equal(pipeline.step(parts, targets), reference.step(parts, targets))
            outputs = pipeline.evaluate(parts)
            for part, output, unchanged in zip(parts, outputs, before, strict=True):
                torch.testing.assert_close(output, theirs(part).detach())
                assert torch.equal(part, unchanged)
    assert_same(ours, theirs)


def test_microbatches_that_do_not_fit_are_refused():
    inputs, targets = make_batch(8)
    cut = pk.Microbatches([inputs[:3], inputs[3:]])
    with pipeline_of(make_mlp()) as pipeline:
        with pytest.raises(InputError, match="both inputs and targets as"):
            pipeline.step(cut, targets)
        with pytest.raises(InputError, match="2 microbatches of inputs, but 1 of targets"):
            pipeline.step(cut, pk.Microbatches([targets]))


def deep_dropout():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 8)]
    for _ in range(4):
        layers += [nn.Dropout(0.4), nn.Linear(8, 8)]
    return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("schedule", "recompute"), crossed(same_order_families(), RECOMPUTED, thorough=SHAPES)
)
def test_dropout_depends_neither_on_schedule_nor_on_recomputation(schedule, recompute):
    ours, theirs = deep_dropout(), deep_dropout()
    reference = SingleDevice(theirs, 4, F.cross_entropy, adamw, seed=3)
    with pipeline_of(ours, schedule, recompute=recompute, optimizer=adamw) as pipeline:
        for step in range(3):
            batch = make_batch(9, seed=step)
            torch.rand(step)  # what others draw does not matter
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
    assert_same(ours, theirs)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_dropout_does_not_depend_on_the_number_of_ranks(schedule, num_ranks):
    ours, theirs = deep_dropout(), deep_dropout()
    reference = SingleDevice(theirs, 4, F.cross_entropy, adamw, seed=3)
    with pipeline_of(ours, schedule, num_ranks, optimizer=adamw) as pipeline:
        for step in range(2):
            batch = make_batch(9, seed=step)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("schedule", "recompute", "scales"),
    crossed(same_order_families(), RECOMPUTED, (False, True), thorough=("1f1b", "zb-v")),
)
def test_autocast_computes_what_one_device_computes(schedule, recompute, scales):
    ours = make_mlp(dropout=0.0)
    theirs = copy.deepcopy(ours)
    scalers = [torch.amp.GradScaler("cpu") if scales else None for _ in range(2)]
    reference = OneDevice(theirs, 4, optimizer=adamw, grad_scaler=scalers[1])
    with pipeline_of(
        ours, schedule, recompute=recompute, optimizer=adamw, grad_scaler=scalers[0]
    ) as pipeline:
        for step in range(3):
            batch = make_batch(13, seed=step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = pipeline.step(*batch)
            assert torch.equal(loss, reference.step(*batch, autocast=torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16):
            assert pipeline.evaluate(make_batch(5)[0]).dtype is torch.bfloat16
            (loss,) = pipeline.steps([make_batch(13)])
        assert torch.equal(loss, reference.step(*make_batch(13), autocast=torch.bfloat16))
    assert_same(ours, theirs)


def normed(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Linear(16, 8)]
    for _ in range(3):
        layers += [nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(*layers, nn.BatchNorm1d(8), nn.Linear(8, 4)).to(dtype)


@pytest.mark.parametrize(
    ("schedule", "recompute"), crossed(same_order_families(), RECOMPUTED, thorough=SHAPES)
)
def test_batch_norm_statistics_are_those_of_accumulation(schedule, recompute):
    ours, theirs = normed(), normed()
    reference = OneDevice(theirs, 4, optimizer=adamw)
    with pipeline_of(ours, schedule, recompute=recompute, optimizer=adamw) as pipeline:
        for step in range(2):
            batch = make_batch(16, torch.float64, seed=step)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
        batches = [make_batch(16, torch.float64, seed=step) for step in range(2)]
        for loss, batch in zip(pipeline.steps(batches), batches, strict=True):
            assert torch.equal(loss, reference.step(*batch))
    assert_same(ours, theirs)
    assert ours[1].num_batches_tracked == 16


@pytest.mark.parametrize(
    ("schedule", "recompute"), crossed(same_order_families(), RECOMPUTED, thorough=SHAPES)
)
def test_batch_norm_statistics_may_be_those_of_minibatches(schedule, recompute):
    # Behind the first norm activations differ: each microbatch is normalised by itself.
    ours, theirs = normed(), normed()
    with pipeline_of(ours, schedule, recompute=recompute, batch_norm="minibatch") as pipeline:
        for step in range(2):
            inputs, targets = make_batch(13, torch.float64, seed=step)
            pipeline.step(inputs, targets)
            theirs[:2](inputs)
    for name, value in theirs[1].state_dict().items():
        found = ours[1].state_dict()[name]
        torch.testing.assert_close(found, value, rtol=TOLERANCE, atol=TOLERANCE)
    assert ours[7].num_batches_tracked == 2


@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_a_frozen_batch_norm_stays_as_it_is(schedule, recompute):
    def freeze(model):
        model.train()
        for layer in model:
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval().requires_grad_(False)

    ours, theirs = normed(), normed()
    reference = OneDevice(theirs, 4, optimizer=adamw)
    with pipeline_of(ours, schedule, recompute=recompute, optimizer=adamw) as pipeline:
        for step in range(3):
            for model in (ours, theirs):
                freeze(model)
            batch = make_batch(16, torch.float64, seed=step)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
            pipeline.evaluate(batch[0])
            assert not ours[1].training
    assert_same(ours, theirs)
    assert ours[1].num_batches_tracked == 0


class Shared(nn.Module):
    """Dropout beside tied weights, so that threads have twins of its modules."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
        self.last[0].weight = self.first[0].weight
        self.double()

    def spine(self):
        return [self.first, self.middle, nn.Tanh(), self.last]

    def forward(self, value):
        for layer in self.spine():
            value = layer(value)
        return value


@pytest.mark.parametrize("build", [Shared, lambda: deep_dropout().double()])
@pytest.mark.parametrize("schedule", [*SHAPES, "chimera"])
def test_training_and_evaluation_mode_may_change_at_any_time(build, schedule):
    ours, theirs = build(), build()
    reference = SingleDevice(theirs, 4, F.cross_entropy, adamw, seed=3)
    # A tied weight, or a stage with two copies, sums in another order.
    tolerance = TOLERANCE if build is Shared or schedule == "chimera" else 0.0
    losses = {}
    with pipeline_of(ours, schedule, optimizer=adamw) as pipeline:
        for step, mode in enumerate([True, False, True, False, True, True]):
            for model in (ours, theirs):
                model.train(mode)
            batch = make_batch(8, torch.float64, seed=0)
            if step % 2:
                (losses[step],) = pipeline.steps([batch])
            else:
                losses[step] = pipeline.step(*batch)
            assert same(losses[step], reference.step(*batch), tolerance)
            outputs = pipeline.evaluate(batch[0])
            assert ours.training is mode
            torch.testing.assert_close(outputs, theirs.eval()(batch[0]).detach())
    assert_same(ours, theirs, tolerance and 1e-11)


@pytest.mark.parametrize(
    ("schedule", "recompute"), crossed(runnable_families(), RECOMPUTED[1:], thorough=SHAPES)
)
def test_recomputation_changes_no_bit(schedule, recompute):
    tolerance = TOLERANCE if schedule == "chimera" else 0.0
    ours, theirs = make_mlp(0.0, torch.float64), make_mlp(0.0, torch.float64)
    reference = OneDevice(theirs, 4)
    with pipeline_of(ours, schedule, recompute=recompute) as pipeline:
        for step in range(2):
            batch = make_batch(13, torch.float64, seed=step)
            assert same(pipeline.step(*batch), reference.step(*batch), tolerance)
    assert_same_gradients(ours, theirs, tolerance)


def test_some_stages_may_recompute_and_others_not():
    ours, theirs = deep_dropout(), deep_dropout()
    plan = make_plan(ours, 3, 4, "zb-h1")
    mixed = zip(plan.stages, ("stage", "none", "layers"), strict=True)
    stages = tuple(
        type(stage)(layers=stage.layers, rank=stage.rank, recompute=how) for stage, how in mixed
    )
    plan = type(plan)(model=plan.model, schedule=plan.schedule, num_microbatches=4, stages=stages)
    reference = SingleDevice(theirs, 4, F.cross_entropy, adamw, seed=3)
    with pk.Pipeline(
        ours, plan, loss=F.cross_entropy, optimizer=adamw, seed=3, deadline_seconds=300
    ) as pipeline:
        for step in range(3):
            batch = make_batch(13, seed=step)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
        kinds = {str(span.op.kind.name) for span in pipeline.timeline.spans if span.op.stage == 0}
    assert "RECOMPUTE" in kinds
    assert_same(ours, theirs)
