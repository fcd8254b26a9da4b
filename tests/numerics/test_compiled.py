"""Compiled passes give what eager mode gives, to rounding: losses, weights and buffers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock import versions
from tests.kit.awkward_layers import MODELS, WIDTH, linear
from tests.kit.examples import in_turns
from tests.kit.live import (
    LEARN,
    PREDICT,
    UNLABELLED,
    differences,
    frames_of,
    live_plan,
    pushed,
    weights_apart,
)
from tests.kit.live import stream_of as live_stream_of
from tests.kit.spilling import spilled_pipeline
from tests.kit.streams import WIDTH as STREAM_WIDTH
from tests.kit.streams import batches, plan_for
from tests.kit.training import momentum, pipeline_of

NUM_STEPS = 3
FAMILIES = [
    "gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v",
    "chimera",
]  # fmt: skip


def batch(rows=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, WIDTH, generator=generator).to(dtype) for _ in range(2))


def trained(name, compile, schedule="1f1b", *, dtype=torch.float64, autocast=False, **options):
    """(losses, state) after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*MODELS[name]()).to(dtype)
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                setattr(module, key, value.to(dtype))
    options = {"loss": F.mse_loss, "optimizer": momentum, **options}
    losses = []
    with (
        pipeline_of(model, schedule, compile=compile, **options) as pipeline,
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        losses = [pipeline.step(*batch(dtype=dtype)) for _ in range(NUM_STEPS)]
    return torch.stack(losses), model.state_dict()


def assert_same(measured, expected, tolerance=1e-9):
    for ours, theirs in zip(measured, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [*((name, "zb-h1") for name in MODELS), *in_turns([(name, "1f1b") for name in MODELS], 3)],
)
def test_awkward_layers(name, schedule):
    assert_same(trained(name, "aot_eager", schedule), trained(name, False, schedule))


@pytest.mark.parametrize("schedule", FAMILIES)
def test_every_kind_of_schedule(schedule):
    assert_same(trained("in place", "aot_eager", schedule), trained("in place", False, schedule))


@pytest.mark.parametrize(
    ("name", "recompute", "schedule"),
    in_turns(
        itertools.product(
            ("in place", "batch norm", "counting", "skip across", "nested"),
            ("stage", "layers"),
            ("1f1b", "zb-h1"),
        ),
        3,
    ),
)
def test_recomputation(name, recompute, schedule):
    runs = [trained(name, how, schedule, recompute=recompute) for how in ("aot_eager", False)]
    assert_same(*runs)


@pytest.mark.parametrize("name", ["in place", "batch norm", "attention"])
def test_autocast(name):
    runs = [trained(name, how, dtype=torch.float32, autocast=True) for how in ("aot_eager", False)]
    assert_same(*runs, tolerance=5e-3)
    without = trained(name, "aot_eager", dtype=torch.float32)
    assert not torch.equal(without[0], runs[0][0])


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.01},
        {"clip_norm": 0.01, "post_validate": True},
        {"optimizer": None},
        {"grad_scaler": True},
    ],
    ids=str,
)
def test_updates_that_depend_on_all_ranks(options):
    def run(compile):
        own = dict(options)
        if "grad_scaler" in own:
            own["grad_scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return trained("in place", compile, dtype=torch.float32, **own)

    assert_same(run("aot_eager"), run(False), tolerance=1e-5)


def test_metrics_see_what_the_loss_is_made_of():
    def run(compile):
        torch.manual_seed(0)
        model = nn.Sequential(*MODELS["in place"]()).double()
        metrics = {"error": lambda outputs, targets: (outputs - targets).abs().mean()}
        with pipeline_of(model, loss=F.mse_loss, compile=compile, metrics=metrics) as pipeline:
            pipeline.step(*batch())
            return pipeline.metrics["error"]

    assert run("aot_eager") == pytest.approx(run(False), rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_memory_that_is_kept_is_counted(schedule):
    def run(recompute, compile):
        blocks = (nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh()) for _ in range(8))
        options = {"loss": F.mse_loss, "compile": compile, "recompute": recompute}
        model = nn.Sequential(*blocks)
        with pipeline_of(model, schedule, count_memory=True, **options) as pipeline:
            pipeline.step(*batch(dtype=torch.float32))
            return pipeline.peaks[0].activation_bytes

    kept = {how: run(how, "aot_eager") for how in ("none", "layers", "stage")}
    assert all(kept[how] <= run(how, False) for how in kept), kept
    assert max(kept["layers"], kept["stage"]) < kept["none"], kept


POLICIES = {
    "latest": versions.Latest(),
    "stash": versions.Stash(),
    "2bw": versions.DoubleBuffer(),
    "pipemare": versions.PipeMare(t1=6, t2=0.3, t3=1, updates="microbatch"),
    "spectrain": versions.Predict(rule="spectrain"),
}


def chain():
    """Layers for streams, without dropout."""
    torch.manual_seed(1)
    pairs = ((nn.Linear(STREAM_WIDTH, STREAM_WIDTH), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*(layer for pair in pairs for layer in pair)).double()


@pytest.mark.parametrize("policy", POLICIES)
def test_passes_read_the_weights_that_the_policy_says(policy):
    def run(compile):
        model = chain()
        plan = plan_for(POLICIES[policy], 3, microbatches=4, model=chain())
        options = {"loss": F.mse_loss, "optimizer": momentum, "seed": 3, "compile": compile}
        with pk.Pipeline(model, plan, **options) as pipeline:
            losses = torch.stack(list(pipeline.steps(batches((8,) * 6))))
        return losses, model.state_dict()

    assert_same(run("aot_eager"), run(False))


KINDS = [LEARN] * 8 + [UNLABELLED] + [LEARN] * 3 + [PREDICT] + [LEARN] * 6


@pytest.mark.parametrize("policy", [None, versions.Stash()], ids=str)
def test_replayed_frames(policy):
    def run(replay):
        model = chain()
        with live_stream_of(model, live_plan(model, 3, policy), replay=replay) as stream:
            return pushed(stream, frames_of(KINDS)), model

    (results, model), (expected, other) = run(True), run(False)
    assert differences(results, expected, 1e-9) == []
    assert weights_apart(model, other, 1e-9) == []


@pytest.mark.parametrize("name", ["batch norm", "skip across"])
def test_inductor(name):
    runs = [trained(name, how, "zb-h1") for how in (True, False)]
    assert_same(*runs, tolerance=1e-7)


def test_inductor_with_layouts_of_its_own():
    """It would rather hand channels behind pixels from pass to pass."""

    def run(compile):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Conv2d(16, 16, 5, padding=2), nn.ReLU()) for _ in range(4)]
        frames = torch.rand(2, 4, 16, 32, 32, generator=torch.Generator().manual_seed(1))
        options = {"loss": F.mse_loss, "optimizer": momentum, "compile": compile}
        with pipeline_of(nn.Sequential(*layers), "1f1b", **options) as pipeline:
            return [pipeline.step(*frames) for _ in range(NUM_STEPS)]

    assert_same(run(True), run(False), tolerance=1e-5)


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_stages_that_come_and_go(recompute):
    """Their weights have no memory between passes, and other addresses in the next."""

    def run(compile):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(4))).double()
        options = {"loss": F.mse_loss, "optimizer": momentum, "compile": compile}
        with spilled_pipeline(model, options=options, recompute=recompute) as pipeline:
            losses = torch.stack([pipeline.step(*batch()) for _ in range(NUM_STEPS)])
            return losses, pipeline.gather_state_dict()

    assert_same(run("aot_eager"), run(False))
