"""A synchronous pipeline gives what one device gives: to the bit where sums have the same order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import in_turns
from tests.kit.helpers import make_batch, make_mlp, runnable_cases
from tests.kit.one_device import assert_same, same
from tests.kit.training import adamw, pipeline_of

EVERYWHERE = ("1f1b", "zb-h1", "zb-v", "chimera")
"""Straight, split, V, and with copies of stages."""
ALL_CASES = runnable_cases([1, 2, 3, 4], range(1, 10))


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_microbatches"),
    in_turns(runnable_cases([1, 2, 3, 4], [1, 2, 3, 8]), 3, always=EVERYWHERE),
)
def test_training_equals_microbatch_accumulation_to_the_bit(schedule, num_ranks, num_microbatches):
    # Chimera halves the microbatches between two copies of each stage: the sums' order differs.
    dtype, tolerance = (torch.float64, 1e-11) if schedule == "chimera" else (torch.float32, 0.0)
    ours, theirs = make_mlp(dtype=dtype), make_mlp(dtype=dtype)
    reference = SingleDevice(theirs, num_microbatches, F.cross_entropy, adamw, seed=3)
    with pipeline_of(ours, schedule, num_ranks, num_microbatches, optimizer=adamw) as pipeline:
        for step, rows in enumerate([13, 8, 5]):  # ragged, and fewer rows than microbatches
            batch = make_batch(rows, dtype, seed=step)
            assert same(pipeline.step(*batch), reference.step(*batch), tolerance)
    assert_same(ours, theirs, tolerance)


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_microbatches"),
    in_turns(runnable_cases([1, 2, 3, 4], [1, 3, 5]), 5, always=EVERYWHERE),
)
def test_gradients_equal_the_plain_full_batch_model(schedule, num_ranks, num_microbatches):
    ours = make_mlp(dropout=0.0, dtype=torch.float64)
    theirs = copy.deepcopy(ours)
    inputs, targets = make_batch(dtype=torch.float64)
    with pipeline_of(ours, schedule, num_ranks, num_microbatches) as pipeline:
        loss = pipeline.step(inputs, targets)
    expected = F.cross_entropy(theirs(inputs), targets)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


def losses_with_dropout(num_ranks, schedule, seed=3):
    model = make_mlp(dropout=0.5)
    with pipeline_of(model, schedule, num_ranks, optimizer=adamw, seed=seed) as pipeline:
        return [pipeline.step(*make_batch(8, seed=step)).item() for step in range(4)]


def test_dropout_depends_on_neither_partition_nor_schedule_but_on_the_seed():
    # pytorch #55036: dropout that changed with the number of partitions.
    runs = {
        (schedule, num_ranks): losses_with_dropout(num_ranks, schedule)
        for schedule, num_ranks, _ in runnable_cases([1, 2, 3, 4], [4])
    }
    expected = runs["1f1b", 2]
    for (schedule, num_ranks), losses in runs.items():
        # Chimera halves the microbatches between two copies of each stage: other sums.
        same_sums = schedule != "chimera"
        wanted = expected if same_sums else pytest.approx(expected, rel=1e-5)
        assert losses == wanted, (schedule, num_ranks)
    assert losses_with_dropout(2, "1f1b", seed=4) != pytest.approx(expected, rel=1e-3)


def test_dropout_differs_between_microbatches_and_steps():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    dropped = []

    def keep_output(output, target):
        dropped.append(output == 0)  # weights change from step to step
        return output.sum()

    with pipeline_of(model, "1f1b", 2, 2, loss=keep_output, reduction="sum") as pipeline:
        for _ in range(2):
            pipeline.step(torch.ones(2, 64), torch.zeros(2))
    assert len({tuple(mask.flatten().tolist()) for mask in dropped}) == 4


@settings(max_examples=25)
@given(
    rows=st.integers(1, 17),
    case=st.sampled_from(ALL_CASES),
)
def test_any_batch_size_is_weighted_as_on_one_device(rows, case):
    schedule, num_ranks, num_microbatches = case
    ours = make_mlp(dropout=0.0, dtype=torch.float64)
    theirs = copy.deepcopy(ours)
    inputs, targets = make_batch(rows, torch.float64)
    with pipeline_of(ours, schedule, num_ranks, num_microbatches) as pipeline:
        loss = pipeline.step(inputs, targets)
        outputs = pipeline.evaluate(inputs)
    expected = F.cross_entropy(theirs(inputs), targets)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs, theirs(inputs).detach(), rtol=1e-12, atol=1e-12)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_a_sum_and_a_masked_mean_are_weighted_as_on_one_device():
    inputs, targets = make_batch(9, torch.float64)
    targets[2:5] = -100  # ignored, so microbatches hold different numbers of terms
    options = [
        {"loss": lambda o, t: F.cross_entropy(o, t, reduction="sum"), "reduction": "sum"},
        {"loss": F.cross_entropy, "weight": lambda t: (t != -100).sum()},
    ]
    for option in options:
        ours = make_mlp(dropout=0.0, dtype=torch.float64)
        theirs = copy.deepcopy(ours)
        with pipeline_of(ours, "1f1b", 2, 3, **option) as pipeline:
            loss = pipeline.step(inputs, targets)
        expected = option["loss"](theirs(inputs), targets)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_lengths_may_change_from_step_to_step():
    # torch's pipelining aborts the process; DeepSpeed #3195 cut tensors to the first shape.
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    twin = copy.deepcopy(model)
    with pipeline_of(model, "1f1b", 2, 2, loss=F.mse_loss) as pipeline:
        for length in (3, 7, 2):
            inputs = torch.randn(4, length, 4)
            loss = pipeline.step(inputs, torch.zeros_like(inputs))
            torch.testing.assert_close(
                loss, F.mse_loss(twin(inputs), torch.zeros_like(inputs)).detach()
            )


class Nested(nn.Module):
    """Passes a dictionary of tensors, a number and None from stage to stage."""

    def __init__(self, last=False):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.last = last

    def forward(self, value):
        if not isinstance(value, dict):
            value = {"hidden": value, "skip": (value, None), "scale": 2}
        hidden = torch.tanh(self.linear(value["hidden"])) * value["scale"]
        if self.last:
            return hidden + value["skip"][0]
        return {**value, "hidden": hidden}


def test_nested_values_pass_between_stages():
    ours = nn.Sequential(Nested(), Nested(), Nested(last=True))
    theirs = copy.deepcopy(ours)
    inputs = torch.randn(6, 4, dtype=torch.float64)
    with pipeline_of(ours, "1f1b", 3, 2, loss=F.mse_loss) as pipeline:
        loss = pipeline.step(inputs, torch.zeros_like(inputs))
    expected = F.mse_loss(theirs(inputs), torch.zeros_like(inputs))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_evaluation_changes_nothing_and_is_in_evaluation_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = copy.deepcopy(model.state_dict())
    inputs = torch.randn(7, 4)
    with pipeline_of(model, "1f1b", 2, 3) as pipeline:
        outputs = pipeline.evaluate(inputs)
        assert not outputs.requires_grad
        assert model[1].training
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value), key
    torch.testing.assert_close(outputs, model.eval()(inputs).detach())


def test_batch_norm_statistics_are_those_of_microbatch_accumulation():
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    theirs = copy.deepcopy(ours)
    inputs, targets = torch.randn(12, 4), torch.randint(0, 4, (12,))
    reference = SingleDevice(theirs, 3, F.cross_entropy)
    with pipeline_of(ours, "1f1b", 2, 3) as pipeline:
        for _ in range(2):
            assert torch.equal(pipeline.step(inputs, targets), reference.step(inputs, targets))
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key


def test_stage_state_dicts_have_the_keys_of_the_unsplit_model():
    model = make_mlp()
    with pipeline_of(model, "1f1b", 3, 2) as pipeline:
        keys = [key for stage in pipeline.stages.values() for key in stage.state_dict()]
    assert keys == list(model.state_dict())
