"""One loop after another: overlapped steps, results on no rank, losses that are not finite, steps
that fail. The same model and the same numbers all the time."""

from __future__ import annotations

import copy
import itertools
import threading
from collections import Counter

import pytest
import torch
from torch import nn

from penstock.base.errors import InputError, StageError
from tests.kit import training
from tests.kit.examples import crossed
from tests.kit.helpers import (
    make_batch,
    make_mlp,
    runnable_families,
    same_order_families,
)
from tests.kit.one_device import OneDevice, assert_same, assert_same_gradients, same
from tests.kit.training import adamw

SHAPES = ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "chimera"]
BATCHES = [make_batch(13, torch.float64, seed=step) for step in range(6)]
CLIPPED = [{}, {"clip_norm": 0.05}, {"clip_norm": 0.05, "post_validate": True}]


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def pipeline_of(model, *how, **options):
    return training.pipeline_of(model, *how, optimizer=adamw, **options)


def pair():
    model = make_mlp(0.0, torch.float64)
    return model, copy.deepcopy(model)


def tolerance_of(schedule):
    return 1e-12 if schedule == "chimera" else 0.0


def trained(num_steps, clip_norm=None, batches=BATCHES, **_):
    """The model after some steps on one device, and their losses."""
    model, _ = pair()
    reference = OneDevice(model, 4, optimizer=adamw, clip_norm=clip_norm)
    return model, [reference.step(*batch) for batch in batches[:num_steps]]


@pytest.mark.parametrize(
    ("schedule", "options"), crossed(runnable_families(), CLIPPED, thorough=SHAPES)
)
def test_overlapped_steps_give_the_losses_of_single_ones(schedule, options):
    ours, _ = pair()
    theirs, expected = trained(6, **options)
    tolerance = tolerance_of(schedule)
    with pipeline_of(ours, schedule, **options) as pipeline:
        losses = list(pipeline.steps(iter(BATCHES)))
        assert list(pipeline.steps([])) == []
        assert pipeline.timeline.spans
    assert same(torch.stack(losses), torch.stack(expected), tolerance)
    assert_same(ours, theirs, tolerance and 1e-11)


def test_a_step_is_under_way_while_the_one_before_is_looked_at():
    ours, _ = pair()
    begun = []
    ours[0].register_forward_pre_hook(lambda *_: begun.append(1))
    with pipeline_of(ours) as pipeline:
        loop = pipeline.steps(BATCHES)
        next(loop)
        for _ in range(1000):
            if len(begun) > 4:
                break
            threading.Event().wait(0.005)
        assert 4 < len(begun) <= 8
        loop.close()


def test_the_norm_and_the_metrics_in_a_loop_are_those_of_the_loss():
    # With post_validate, the norm is known one minibatch later.
    ours, theirs = pair()
    metrics = {"right": lambda output, targets: (output.argmax(-1) == targets).double().mean()}
    reference = OneDevice(theirs, 4, optimizer=adamw, clip_norm=0.05)
    with pipeline_of(ours, metrics=metrics, clip_norm=0.05) as pipeline:
        for _, (inputs, targets) in zip(pipeline.steps(BATCHES), BATCHES, strict=True):
            right = (theirs(inputs).argmax(-1) == targets).double().mean()
            reference.step(inputs, targets)
            torch.testing.assert_close(pipeline.metrics["right"], right)
            assert torch.equal(pipeline.grad_norm, reference.norm)


class Trouble(Exception):
    pass


def failing_loader(count):
    yield from BATCHES[:count]
    raise Trouble


@pytest.mark.parametrize(
    ("schedule", "options", "end"),
    crossed(SHAPES, CLIPPED, ("break", "loader", "caller"), thorough=("1f1b", "zb-v")),
)
def test_a_loop_that_is_left_early_leaves_everything_in_order(schedule, options, end):
    ours, _ = pair()
    with pipeline_of(ours, schedule, **options) as pipeline:
        found = []
        if end == "break":
            for loss in pipeline.steps(BATCHES):
                found.append(loss)
                if len(found) == 2:
                    break
            num_steps = 3  # the third was under way
        elif end == "loader":
            with pytest.raises(Trouble):
                for loss in pipeline.steps(failing_loader(3)):
                    found.append(loss)
            num_steps = 3  # all that it gave
            assert len(found) == num_steps
        else:
            loop = pipeline.steps(BATCHES)
            found.append(next(loop))
            with pytest.raises(Trouble):
                loop.throw(Trouble)
            num_steps = 2
        after, _ = trained(num_steps, **options)
        tolerance = tolerance_of(schedule) and 1e-11
        assert_same(ours, after, tolerance)
        found = [pipeline.step(*batch) for batch in BATCHES[num_steps:]]
    theirs, expected = trained(6, **options)
    assert same(torch.stack(found), torch.stack(expected[num_steps:]), tolerance)
    assert_same(ours, theirs, tolerance)


@pytest.mark.parametrize("post_validate", [False, True])
def test_a_loop_that_is_left_early_leaves_the_loss_scale_in_order(post_validate):
    ours, theirs = pair()
    scalers = [scaler(), scaler()]
    reference = OneDevice(theirs, 4, optimizer=adamw, grad_scaler=scalers[1])
    with pipeline_of(ours, grad_scaler=scalers[0], post_validate=post_validate) as pipeline:
        for _ in pipeline.steps(BATCHES):
            break
        for batch in BATCHES[:2]:
            reference.step(*batch)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert torch.equal(pipeline.step(*BATCHES[2]), reference.step(*BATCHES[2]))
    assert_same(ours, theirs)
    assert scalers[0].state_dict() == scalers[1].state_dict()


def test_nothing_else_may_run_inside_the_loop():
    ours, _ = pair()
    theirs, _ = trained(3)
    with pipeline_of(ours) as pipeline:
        for _ in pipeline.steps(BATCHES[:3]):
            for call in (
                lambda: pipeline.step(*BATCHES[0]),
                lambda: pipeline.evaluate(BATCHES[0][0]),
                lambda: next(pipeline.steps(BATCHES)),
            ):
                with pytest.raises(InputError, match=r"running already.*leave the loop"):
                    call()
    assert_same(ours, theirs)


def test_a_minibatch_that_does_not_fit_ends_the_loop_and_no_more():
    ours, _ = pair()
    theirs, expected = trained(3)
    bad = (BATCHES[0][0], BATCHES[0][1][:3])
    with pipeline_of(ours) as pipeline:
        with pytest.raises(InputError, match="inputs have 13 rows, but targets have 3"):
            list(pipeline.steps([*BATCHES[:2], bad]))
        assert torch.equal(pipeline.step(*BATCHES[2]), expected[2])
    assert_same(ours, theirs)


@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize("options", CLIPPED)
def test_without_results_there_is_nothing_never_a_placeholder(schedule, options):
    # torchtitan #1232: −1 where a rank does not hold the loss.
    ours, _ = pair()
    theirs, _ = trained(6, **options)
    metrics = {"rows": lambda _, targets: len(targets)}
    with pipeline_of(ours, schedule, results="none", metrics=metrics, **options) as pipeline:
        assert [pipeline.step(*batch) for batch in BATCHES[:3]] == [None] * 3
        assert list(pipeline.steps(BATCHES[3:])) == [None] * 3
        assert pipeline.evaluate(BATCHES[0][0]) is None
        assert pipeline.metrics == {}
    assert_same(ours, theirs, tolerance_of(schedule) and 1e-11)


def spoilt(batch, row=7):
    inputs, targets = batch[0].clone(), batch[1]
    inputs[row] = torch.nan
    return inputs, targets


@pytest.mark.parametrize(
    ("schedule", "options"), crossed(same_order_families(), CLIPPED, thorough=SHAPES)
)
def test_a_loss_that_is_not_finite_stops_before_any_weight_has_changed(schedule, options):
    ours, _ = pair()
    theirs, expected = trained(3, **options)
    with pipeline_of(ours, schedule, **options) as pipeline:
        assert torch.equal(pipeline.step(*BATCHES[0]), expected[0])
        before = copy.deepcopy(ours)
        last = pipeline.plan.build_schedule().num_stages - 1
        message = rf"stage {last}, microbatch 2, op {last}F2: ArithmeticError: the loss is nan"
        with pytest.raises(StageError, match=message):
            pipeline.step(*spoilt(BATCHES[1]))
        assert_same(ours, before)
        assert all(parameter.grad is None for parameter in ours.parameters())
        for batch, loss in zip(BATCHES[1:3], expected[1:], strict=True):
            assert torch.equal(pipeline.step(*batch), loss)
    assert_same(ours, theirs)


@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize("options", CLIPPED)
def test_a_loss_that_is_not_finite_stops_a_loop_at_its_step(schedule, options):
    ours, _ = pair()
    batches = [*BATCHES[:2], spoilt(BATCHES[2]), *BATCHES[3:]]
    tolerance = tolerance_of(schedule)
    theirs, expected = trained(6, **options)
    found = []
    with pipeline_of(ours, schedule, **options) as pipeline:
        with pytest.raises(StageError, match="the loss is nan"):
            found.extend(pipeline.steps(batches))
        assert same(torch.stack(found), torch.stack(expected[: len(found)]), tolerance)
        if options.get("post_validate"):
            return  # whether it may go on depends on who had read the last verdict
        assert_same(ours, trained(2, **options)[0], tolerance and 1e-11)
        for batch, loss in zip(BATCHES[2:], expected[2:], strict=True):
            assert same(pipeline.step(*batch), loss, tolerance)
    assert_same(ours, theirs, tolerance and 1e-11)


def test_a_loss_that_is_not_finite_is_returned_if_one_wants_it():
    ours, theirs = pair()
    reference = OneDevice(theirs, 4, optimizer=adamw)
    with pipeline_of(ours, stop_at_nan=False) as pipeline:
        for batch in (BATCHES[0], spoilt(BATCHES[1])):
            assert same(pipeline.step(*batch), reference.step(*batch))
    assert all(parameter.isnan().any() for parameter in ours.parameters())


class Once:
    """Raises at one call of a layer."""

    def __init__(self, layer, at):
        self.calls, self.at = 0, at
        layer.register_forward_pre_hook(lambda *_: self.call())

    def call(self):
        self.calls += 1
        if self.calls == self.at:
            raise Trouble("once")


@pytest.mark.parametrize(
    ("schedule", "options", "layer"),
    crossed(
        [*same_order_families(), "chimera"],
        [*CLIPPED, {"grad_scaler": True}],
        (0, 3, 5),
        thorough=("1f1b", "zb-v"),
    ),
)
def test_a_failed_step_can_be_repeated(schedule, options, layer):
    ours, theirs = pair()
    scales = "grad_scaler" in options
    options = {**options, **({"grad_scaler": scaler()} if scales else {})}
    reference = OneDevice(
        theirs,
        4,
        optimizer=adamw,
        clip_norm=options.get("clip_norm"),
        grad_scaler=scaler() if scales else None,
    )
    tolerance = tolerance_of(schedule)
    Once(ours[layer], at=4 + 3)
    with pipeline_of(ours, schedule, **options) as pipeline:
        for index, batch in enumerate(BATCHES[:4]):
            if index == 1:
                with pytest.raises(StageError, match="Trouble: once"):
                    pipeline.step(*batch)
            assert same(pipeline.step(*batch), reference.step(*batch), tolerance)
    assert_same(ours, theirs, tolerance and 1e-11)


def test_a_failed_call_drops_what_the_calls_before_it_have_accumulated():
    ours, _ = pair()
    Once(ours[3], at=4 + 3)
    with pipeline_of(ours) as pipeline:
        pipeline.step(*BATCHES[0], update=False)
        assert ours[0].weight.grad is not None
        with pytest.raises(StageError, match="Trouble: once"):
            pipeline.step(*BATCHES[1], update=False)
        assert all(parameter.grad is None for parameter in ours.parameters())


def test_a_failed_evaluation_leaves_accumulated_gradients_alone():
    ours, theirs = pair()
    reference = OneDevice(theirs, 4, optimizer=adamw)
    Once(ours[3], at=4 + 3)
    with pipeline_of(ours) as pipeline:
        pipeline.step(*BATCHES[0], update=False)
        reference.step(*BATCHES[0], update=False)
        with pytest.raises(StageError, match="Trouble: once"):
            pipeline.evaluate(BATCHES[0][0])
        assert_same_gradients(ours, theirs)
        pipeline.step(*BATCHES[1])
        reference.step(*BATCHES[1])
    assert_same(ours, theirs)


def test_an_error_in_a_minibatch_begun_on_trust_is_told():
    # The rank that fails must not be forgotten by those who begin the minibatch anew.
    ours, _ = pair()
    for at in range(5, 20):
        Once(ours[5], at)
    with (
        pipeline_of(ours, clip_norm=0.05, post_validate=True, deadline_seconds=300) as pipeline,
        pytest.raises(StageError, match="Trouble: once"),
    ):
        list(itertools.chain(pipeline.steps(BATCHES)))


@pytest.mark.parametrize("schedule", SHAPES)
def test_no_layer_runs_more_often_than_asked(schedule):
    # torch's shape inference runs layers once more, on uninitialised memory.
    model = nn.Sequential(nn.Linear(16, 4), *(nn.Identity() for _ in range(5))).double()
    runs = []
    for number, layer in enumerate(model):
        layer.register_forward_pre_hook(
            lambda module, _, number=number: runs.append((number, module.training))
        )
    with pipeline_of(model, schedule) as pipeline:
        pipeline.step(*BATCHES[0])
        pipeline.evaluate(BATCHES[0][0])
        list(pipeline.steps(BATCHES[:2]))
    assert Counter(runs) == {
        (number, training): count
        for number in range(len(model))
        for training, count in ((True, 12), (False, 4))
    }
