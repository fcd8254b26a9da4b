"""The façade in threads: what a caller sees, and what a caller's settings do."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import penstock as pk
from penstock.base.errors import InputError
from penstock.core.schedule import Kind, Op
from penstock.trial.reference.single_device import SingleDevice
from tests.kit import training
from tests.kit.helpers import make_batch, make_mlp, make_plan


def pipeline_of(model, num_ranks=2, num_microbatches=2, **options):
    return training.pipeline_of(model, "1f1b", num_ranks, num_microbatches, **options)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def assert_equal_gradients(ours, theirs):
    for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
        assert torch.equal(mine, other)


def twins(**options):
    model = make_mlp(**options)
    return model, copy.deepcopy(model)


def test_it_says_how_messages_travel_between_its_ranks():
    with pipeline_of(make_mlp()) as pipeline:
        assert pipeline.transport == (
            "Ranks are threads of this process, and hand values over as they are."
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_a_step_is_that_of_one_device(dtype):
    # Autocast belongs to a thread: without care the stages would silently compute in float32.
    ours, theirs = twins(dropout=0.0)
    inputs, targets = make_batch(8)
    with pipeline_of(ours) as pipeline:
        for _ in range(2):  # a second time, for casts that were cached
            with torch.autocast("cpu", dtype):
                loss = pipeline.step(inputs, targets)
    expected = torch.zeros(())
    for _ in range(2):
        for rows, wanted in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            with torch.autocast("cpu", dtype):
                part = F.cross_entropy(theirs(rows), wanted)
            (part * 0.5).backward()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        parts = zip(inputs.chunk(2), targets.chunk(2), strict=True)
        expected = sum(F.cross_entropy(theirs(rows), wanted) * 0.5 for rows, wanted in parts)
    assert torch.equal(loss, expected)
    assert_equal_gradients(ours, theirs)
    with torch.no_grad():
        assert not torch.equal(loss, F.cross_entropy(theirs(inputs), targets))


def test_autocast_around_the_whole_loop_sees_updated_weights():
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    ours, theirs = twins(dropout=0.0)
    losses = []
    with pipeline_of(ours, optimizer=sgd) as pipeline, torch.autocast("cpu", torch.bfloat16):
        losses = [pipeline.step(*make_batch(8)) for _ in range(3)]
    with pipeline_of(theirs, optimizer=sgd) as pipeline:
        for loss in losses:
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(pipeline.step(*make_batch(8)), loss)


def test_autocast_holds_for_evaluation_too():
    model, inputs = make_mlp(), make_batch(8)[0]
    with pipeline_of(model) as pipeline, torch.autocast("cpu", torch.bfloat16):
        assert pipeline.evaluate(inputs).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_computes_gradients_whatever_the_callers_mode(mode):
    ours, theirs = twins()
    batch = make_batch(8)
    with pipeline_of(ours) as pipeline, mode():
        loss = pipeline.step(*batch)
    assert torch.equal(loss, SingleDevice(theirs, 2, F.cross_entropy, seed=3).step(*batch))
    assert_equal_gradients(ours, theirs)


def test_evaluation_computes_none_whatever_the_callers_mode():
    model = make_mlp()
    with pipeline_of(model) as pipeline, torch.enable_grad():
        outputs = pipeline.evaluate(make_batch(8)[0])
    assert not outputs.requires_grad
    assert gradients(model) == [None] * 6


class Asking(nn.Module):
    """Asks for settings of the process as a stage sees them."""

    def forward(self, value):
        self.seen = (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_num_threads(),
        )
        return value


def test_settings_of_the_process_hold_in_the_stages():
    model = nn.Sequential(nn.Linear(16, 4, dtype=torch.float64), Asking())
    with pipeline_of(model) as pipeline:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        try:
            with torch.autograd.set_detect_anomaly(True, check_nan=False):
                pipeline.step(*make_batch(8, torch.float64))
        finally:
            torch.use_deterministic_algorithms(False)
            torch.set_default_dtype(torch.float32)
    assert model[1].seen == (torch.float64, True, True, 1)


def test_intra_op_threads_are_those_of_the_plan_and_restored_afterwards():
    model = nn.Sequential(nn.Linear(16, 4), Asking())
    plan = make_plan(model, 2, 2)
    torch.set_num_threads(2)
    with pk.Pipeline(model, plan, loss=F.cross_entropy) as pipeline:
        pipeline.step(*make_batch(8))
    assert model[1].seen[-1] == plan.num_threads == 1
    assert torch.get_num_threads() == 2
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [2]


def test_a_nan_loss_is_returned_as_it_is_where_one_asks_for_it():
    model, (inputs, targets) = make_mlp(), make_batch(8)
    inputs[3] = torch.nan
    with pipeline_of(model, stop_at_nan=False) as pipeline:
        assert pipeline.step(inputs, targets).isnan()
        assert pipeline.step(*make_batch(8)).isfinite()


def test_a_microbatch_without_any_term_counts_nothing():
    # The mean over its terms is 0/0; on one device they would not have been a batch of their own.
    def masked_mean(output, targets):
        mask = targets != -100
        losses = F.cross_entropy(output, targets.clamp(min=0), reduction="none")
        return (losses * mask).sum() / mask.sum()

    inputs, targets = make_batch(8, torch.float64)
    targets[:4] = -100
    for loss in (masked_mean, F.cross_entropy):
        ours, theirs = twins(dropout=0.0, dtype=torch.float64)
        third = copy.deepcopy(ours)
        options = {"loss": loss, "weight": lambda part: (part != -100).sum()}
        with pipeline_of(ours, **options) as pipeline:
            found = pipeline.step(inputs, targets)
        assert torch.equal(found, SingleDevice(third, 2, seed=3, **options).step(inputs, targets))
        expected = loss(theirs(inputs), targets)
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
        for a, b, c in zip(gradients(ours), gradients(theirs), gradients(third), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            assert torch.equal(a, c)


def test_inputs_and_targets_of_a_row_stay_together():
    # DeepSpeed #5729: labels taken from another batch.
    pairs = []

    def note(output, targets):
        pairs.extend(zip(output[:, 0].tolist(), targets.tolist(), strict=True))
        return output.sum()

    model = nn.Sequential(nn.Identity(), nn.Linear(1, 1), nn.Identity())
    nn.init.ones_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    with pipeline_of(model, 3, 4, loss=note, reduction="sum") as pipeline:
        for _ in range(3):
            pipeline.step(torch.arange(11.0)[:, None], torch.arange(11.0))
    assert pairs == [(float(row), float(row)) for row in range(11)] * 3


def test_frozen_stages_train_the_others_only():
    ours, theirs = twins(dropout=0.0)
    for model in (ours, theirs):
        model[0].requires_grad_(False)
    batch = make_batch(8)
    with pipeline_of(ours, 3, cuts=[1, 4]) as pipeline:
        loss = pipeline.step(*batch)
    assert torch.equal(loss, SingleDevice(theirs, 2, F.cross_entropy, seed=3).step(*batch))
    assert gradients(ours)[:2] == [None, None]
    for mine, other in zip(gradients(ours)[2:], gradients(theirs)[2:], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("cut", range(1, 6))
def test_any_layer_may_begin_a_stage_even_one_that_overwrites_its_input(cut):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(16, 8),
            nn.Flatten(),
            nn.ReLU(inplace=True),
            nn.Linear(8, 8),
            nn.LeakyReLU(inplace=True),
            nn.Linear(8, 4),
        )

    ours, theirs, batch = model(), model(), make_batch(8)
    with pipeline_of(ours, cuts=[cut]) as pipeline:
        loss = pipeline.step(*batch)
    assert torch.equal(loss, SingleDevice(theirs, 2, F.cross_entropy).step(*batch))
    assert_equal_gradients(ours, theirs)


def test_a_layer_outside_the_model_is_in_evaluation_mode_too():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def spine(self):
            return [self.linear, nn.Dropout(0.9)]

    model, inputs = Model(), make_batch(8)[0]
    with pipeline_of(model) as pipeline:
        by_microbatch = torch.cat([model.linear(part) for part in inputs.chunk(4)])
        torch.testing.assert_close(pipeline.evaluate(inputs), by_microbatch.detach())
        (dropout,) = pipeline.stages[1].layers
        assert dropout.module.training


def test_outputs_of_an_evaluation_are_freed_with_their_last_user():
    parts = []

    class Note(nn.Module):
        def forward(self, value):
            parts.append(StorageWeakRef(value.untyped_storage()))
            return value

    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4), Note())
    with pipeline_of(model) as pipeline:
        outputs = pipeline.evaluate(make_batch(8)[0])
        whole = StorageWeakRef(outputs.untyped_storage())
        # The workers' threads go on waiting; they must not hold on to the last step meanwhile.
        for thread in pipeline._parts.driver._threads:
            thread.join(timeout=0.05)
        assert [part.expired() for part in parts] == [True, True]
        del outputs
        assert whole.expired()


def test_nested_inputs_targets_and_outputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, value):
            return {"logits": self.linear(value["features"]), "ids": value["ids"], "name": "x"}

    def loss(output, targets):
        return F.cross_entropy(output["logits"], targets[0])

    inputs, targets = make_batch(7)
    model = nn.Sequential(Model(), nn.Identity())
    with pipeline_of(model, loss=loss) as pipeline:
        found = pipeline.step({"features": inputs, "ids": torch.arange(7)}, (targets, None))
        outputs = pipeline.evaluate({"features": inputs, "ids": torch.arange(7)})
    torch.testing.assert_close(found, F.cross_entropy(outputs["logits"], targets))
    assert torch.equal(outputs["ids"], torch.arange(7))
    assert outputs["name"] == "x"


def test_the_timeline_is_that_of_the_last_step():
    model = make_mlp()
    with pipeline_of(model) as pipeline:
        with pytest.raises(InputError, match="no timeline yet: run a step"):
            _ = pipeline.timeline
        pipeline.step(*make_batch(8))
        timeline = pipeline.timeline
        pipeline.evaluate(make_batch(8)[0])
        assert pipeline.timeline is timeline
        pipeline.step(*make_batch(1))
        assert pipeline.timeline is not timeline
    forwards = [span.op for span in timeline.spans if span.op.kind is Kind.FORWARD]
    assert sorted(forwards) == sorted(Op(s, Kind.FORWARD, m) for s in range(2) for m in range(2))
    assert all(span.end >= span.start for span in timeline.spans)


def test_without_an_optimizer_gradients_add_up():
    ours, theirs = twins(dropout=0.0)
    reference = SingleDevice(theirs, 2, F.cross_entropy)
    with pipeline_of(ours) as pipeline:
        for seed in range(3):
            pipeline.step(*make_batch(8, seed=seed))
            reference.step(*make_batch(8, seed=seed))
    assert_equal_gradients(ours, theirs)


def test_leaving_ends_the_threads_and_closing_twice_is_harmless():
    before = threading.active_count()
    model = make_mlp()
    with pipeline_of(model, 3) as pipeline:
        assert threading.active_count() == before + 3
        pipeline.step(*make_batch(8))
    assert threading.active_count() == before
    pipeline.close()
    for call in (
        lambda: pipeline.step(*make_batch(8)),
        lambda: pipeline.evaluate(make_batch(8)[0]),
    ):
        with pytest.raises(InputError, match="this Pipeline is closed; build a new one"):
            call()
    # What has been trained stays readable.
    assert list(pipeline.state_dict()) == list(model.state_dict())


def test_two_pipelines_train_side_by_side():
    models = [make_mlp(seed=seed) for seed in (0, 1)]
    copies = copy.deepcopy(models)
    with pipeline_of(models[0]) as first, pipeline_of(models[1]) as second:
        for seed in range(2):
            batch = make_batch(8, seed=seed)
            first.step(*batch)
            second.step(*batch)
    for ours, theirs in zip(models, copies, strict=True):
        reference = SingleDevice(theirs, 2, F.cross_entropy, seed=3)
        for seed in range(2):
            reference.step(*make_batch(8, seed=seed))
        assert_equal_gradients(ours, theirs)
