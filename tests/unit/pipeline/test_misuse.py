"""Mistakes that a newcomer makes with a pipeline; each story ends in one clear message."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.engine.run.drive.driver import failure_notice
from penstock.engine.transport.base import Patience, overdue
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.helpers import make_batch, make_mlp, make_plan


def boom(*_):
    raise ValueError("boom")


class NeedsClosure(torch.optim.SGD):
    """Calls the loss itself."""

    def step(self, closure):
        return super().step(closure)


class TanhInPlace(nn.Module):
    """Writes into its input, and not twice the same."""

    def forward(self, value):
        return value.mul_(2).tanh_()


def test_an_in_place_first_layer_changes_neither_the_result_nor_the_callers_data():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(TanhInPlace(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))

    inputs, targets = torch.randn(8, 4), torch.randint(0, 2, (8,))
    before = inputs.clone()
    ours, theirs = build(), build()
    reference = SingleDevice(theirs, 4, F.cross_entropy)
    # Several microbatches are in flight in the first stage while it writes in place.
    with pk.Pipeline(ours, make_plan(ours, 2, 4, cuts=[3]), loss=F.cross_entropy) as pipeline:
        assert torch.equal(pipeline.step(inputs, targets), reference.step(inputs, targets))
        pipeline.evaluate(inputs)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert torch.equal(inputs, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": lambda parameters: None}, "optimizer function made is of type NoneType"),
        (
            {"optimizer": torch.optim.SGD(make_mlp().parameters())},
            r"optimizer is made already \(SGD\)",
        ),
        ({"loss": 3}, "loss is of type int; give a function"),
        ({"weight": 0.5}, "weight is of type float"),
        ({"transport": "process-group"}, "torchrun --nproc-per-node=2"),
        ({"clip_norm": "1"}, "clip_norm is '1', but must be a number > 0"),
        ({"clip_norm": torch.ones(2)}, "clip_norm is tensor"),
        ({"clip_norm": 10**400}, "clip_norm is 1000.* at most"),
        ({"clip_stage_norm": [1]}, r"clip_stage_norm is \[1\], but must be a number"),
        ({"deadline_seconds": "8"}, "deadline_seconds is '8', .* would hang all others"),
        ({"deadline_seconds": None}, "deadline_seconds is None"),
        ({"deadline_seconds": 1e300}, "deadline_seconds is 1e[+]300"),
        ({"grad_scaler": "x"}, "grad_scaler is of type str; give a torch.amp.GradScaler"),
        ({"seed": "a"}, "seed is 'a', but must be a whole number"),
        ({"seed": 1.5}, "seed is 1.5, but must be a whole number"),
        ({"metrics": [boom]}, "metrics is of type list; give functions by name"),
        ({"metrics": {"right": 1}}, "metrics: 'right' is of type int"),
        ({"metrics": {1: boom}}, "metrics: the name 1 is of type int"),
        ({"post_validate": "no"}, "post_validate is 'no'; give True or False"),
        ({"stop_at_nan": 0.1}, "stop_at_nan is 0.1; give True or False"),
        ({"count_memory": "yes"}, "count_memory is 'yes'; give True or False"),
        ({"record": 1}, "record is 1; give True or False"),
        ({"results": torch.ones(2)}, "results is tensor.* use every rank or none"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS calls the loss several times per step"),
        ({"optimizer": NeedsClosure}, "NeedsClosure calls the loss several times"),
        ({"lr_scheduler": lambda _: None}, "lr_scheduler function made is of type NoneType"),
        ({"lr_scheduler": lambda _: boom()}, "lr_scheduler of stage 0 cannot .* ValueError: boom"),
    ],
)
def test_what_cannot_train_is_refused_at_once(options, message):
    model = make_mlp()
    usual = {"loss": F.cross_entropy, "optimizer": torch.optim.SGD}
    with pytest.raises(pk.errors.InputError, match=message):
        pk.Pipeline(model, make_plan(model, 2, 4), **{**usual, **options})


INPUTS, TARGETS = make_batch(8)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (
            lambda it: it.step(INPUTS.to_sparse(), TARGETS),
            {},
            "inputs hold a tensor that is sparse_",
        ),
        (lambda it: it.step(INPUTS, TARGETS.to_sparse()), {}, "targets hold .* sparse_coo"),
        (lambda it: it.evaluate(INPUTS.to_sparse()), {}, "sparse_coo, which cannot be cut"),
        (
            lambda it: it.step(pk.Microbatches([INPUTS.to_sparse()]), pk.Microbatches([TARGETS])),
            {},
            "inputs hold a tensor that is sparse_coo",
        ),
        (
            lambda it: it.step(torch.nested.nested_tensor([*INPUTS]), TARGETS),
            {},
            "inputs hold a tensor that is nested",
        ),
        (
            lambda it: it.step(pk.Microbatches([[]]), pk.Microbatches([[]])),
            {},
            "microbatch 0 of the inputs holds no tensor",
        ),
        (lambda it: it.step(INPUTS, TARGETS, share=math.nan), {}, "share is nan, but must be ≥ 0"),
        (lambda it: it.step(INPUTS, TARGETS, share="1"), {}, "share is '1', but must be a number"),
        (lambda it: it.step(INPUTS, TARGETS, update=[]), {}, r"update is \[\]; give True or False"),
        (
            lambda it: it.step(INPUTS, TARGETS),
            {"weight": lambda _: boom()},
            "weight cannot count the terms of the targets of microbatch 0: ValueError: boom",
        ),
        (
            lambda it: [*it.steps([(INPUTS, TARGETS)])],
            {"weight": lambda _: torch.ones(2)},
            "weight cannot count .* give one number",
        ),
        (
            lambda it: it.step(INPUTS, TARGETS),
            {"metrics": {"right": lambda *_: torch.ones(2)}},
            r"the metric 'right' gave a tensor of shape \(2,\)",
        ),
        (
            lambda it: it.step(INPUTS, TARGETS),
            {"metrics": {"right": lambda *_: None}},
            "the metric 'right' gave None; it must return one number",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_a_step_cannot_use_is_refused_and_harms_nothing(call, options, message):
    model = make_mlp()
    usual = {"loss": F.cross_entropy, "deadline_seconds": 300}
    with pk.Pipeline(model, make_plan(model, 2, 4), **usual, **options) as pipeline:
        with pytest.raises(pk.errors.PenstockError, match=message):
            call(pipeline)
        assert pipeline.evaluate(INPUTS).shape == (8, 4)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: pk.Pipeline(model, make_plan(make_mlp(), 2, 2)),
        lambda model: pk.profile(model, INPUTS, ranks=0, repeats=1),
    ],
)
def test_a_layer_without_shapes_is_named(use):
    message = r"layer '1' \(LazyLinear\) has no shapes yet: call the model once"
    with pytest.raises(pk.errors.ModelError, match=message):
        use(nn.Sequential(nn.Linear(16, 8), nn.LazyLinear(4)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": None}, "repeats is None, but must be a whole number ≥ 1"),
        ({"num_threads": "2"}, "num_threads is '2', but must be a whole number ≥ 1"),
        ({"sizes": 4}, "sizes is of type int; give a list"),
        ({"sizes": ["4"]}, "sizes: '4' rows cannot be taken"),
        ({"progress": True}, "progress is of type bool"),
    ],
)
def test_a_profile_says_what_it_cannot_be_given(options, message):
    with pytest.raises(pk.errors.InputError, match=message):
        pk.profile(make_mlp(), INPUTS, **options)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_others_hear_what_ended_a_rank_by_name(kind):
    assert failure_notice(1, kind(3)) == f"rank 1 failed: {kind.__name__}: 3"
    assert failure_notice(1, pk.errors.InputError("no")) == "rank 1 failed: no"


def test_a_deadline_tells_of_both_reasons():
    message = overdue("rank 0, waiting at 0RECV_B3", 1, Patience(8.0))
    assert "within 8 s" in message
    assert "raise deadline_seconds" in message
    assert "fewer minibatches or microbatches" in message


def test_a_plan_must_be_a_plan():
    with pytest.raises(pk.errors.InputError, match="the plan is of type dict; make one with"):
        pk.Pipeline(make_mlp(), {})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pk.plan(make_mlp(), microbatches=2), "the graph is of type Sequential"),
        (lambda: pk.simulate("1f1b"), "the schedule is '1f1b', the name of a schedule"),
        (lambda: pk.check("1f1c"), "the schedule is of type str"),
        (lambda: pk.draw(3), "the timeline is of type int"),
    ],
)
def test_a_name_or_a_model_where_a_value_belongs(call, message):
    with pytest.raises(pk.errors.InputError, match=message):
        call()


def test_a_rank_without_ops_is_refused():
    with pytest.raises(pk.errors.ScheduleError, match="rank 1 has no ops"):
        pk.check(pk.Schedule.parse("0F0,0B0\n\n1F0,1B0\n"))


def test_a_second_step_at_the_same_time_is_refused_and_harms_nothing():
    started, go_on = threading.Event(), threading.Event()

    def slow_loss(outputs, targets):
        started.set()
        assert go_on.wait(20)
        return F.cross_entropy(outputs, targets)

    model = make_mlp()
    with pk.Pipeline(model, make_plan(model, 2, 2), loss=slow_loss) as pipeline:
        first = threading.Thread(target=pipeline.step, args=make_batch(4))
        first.start()
        assert started.wait(20)
        with pytest.raises(pk.errors.InputError, match="running already, in another thread"):
            pipeline.step(*make_batch(4))
        go_on.set()
        first.join()
        pipeline.step(*make_batch(4))


def test_a_plan_for_accelerators_that_are_not_there_is_refused_with_a_remedy():
    model = make_mlp()
    plan = make_plan(model, 2, 4)
    cores = tuple(pk.Device(name=f"cpu{rank}", kind="cpu") for rank in range(2))
    pk.Pipeline(model, replace(plan, devices=cores)).close()
    gpus = tuple(pk.Device(name=f"gpu{rank}", kind="gpu") for rank in range(2))
    with pytest.raises(
        pk.errors.InputError,
        match=r"for accelerators: 2 are needed .* has none .*; give devices='cpu'",
    ):
        pk.Pipeline(model, replace(plan, devices=gpus))
    pk.Pipeline(model, replace(plan, devices=gpus), devices="cpu").close()
    with pytest.raises(pk.errors.InputError, match=r"devices: 'cuda:0' is not here; .* none but"):
        pk.Pipeline(model, plan, devices="cuda:0")


def test_hooks_on_what_no_stage_runs_are_refused_whenever_they_are_registered():
    model = make_mlp()
    plan = make_plan(model, 2, 4)
    message = r"the model \(Sequential\) has the hook .*, which would never be called"
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(pk.errors.ModelError, match=message):
        pk.Pipeline(model, plan)
    handle.remove()
    with pk.Pipeline(model, plan, loss=F.cross_entropy) as pipeline:
        pipeline.step(*make_batch(8))
        handle = model.register_forward_pre_hook(lambda *_: None)
        with pytest.raises(pk.errors.ModelError, match=message):
            pipeline.step(*make_batch(8))
        handle.remove()
        pipeline.step(*make_batch(8))


def test_a_layer_that_is_replaced_is_not_left_untrained():
    model = make_mlp()
    with pk.Pipeline(model, make_plan(model, 2, 4), loss=F.cross_entropy) as pipeline:
        model[3] = nn.Linear(32, 32)
        with pytest.raises(pk.errors.ModelError, match="has got other layers since the Pipeline"):
            pipeline.step(*make_batch(8))


def test_a_layer_cannot_close_the_pipeline_that_runs_it():
    model = make_mlp()
    with pk.Pipeline(model, make_plan(model, 2, 4), loss=F.cross_entropy) as pipeline:
        hook = model[0].register_forward_pre_hook(lambda *_: pipeline.close())
        for call in (pipeline.step, pipeline.evaluate_loss):
            with pytest.raises(pk.errors.RunError, match=r"close\(\) was called inside a layer"):
                call(*make_batch(8))
        hook.remove()
        assert pipeline.step(*make_batch(8)).isfinite()  # it is open, and has come to rest
    with pytest.raises(pk.errors.InputError, match="closed"):
        pipeline.step(*make_batch(8))
