"""Stages that come to an accelerator and leave it give the bits of those that stay in main memory,
under a limit of the device's memory, and no op or copy runs ahead of what it needs: the emulated
devices raise where a wait is missing."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import FileError, StageError
from penstock.engine.weights import buffers, transfers
from penstock.engine.weights.movers import SideStreams
from penstock.planning.plans.spilling import Spill, Tier
from tests.kit.examples import in_turns
from tests.kit.helpers import make_batch
from tests.kit.one_device import assert_same_values
from tests.kit.spilling import HOST, Picky, make_net, make_tied, residence_of, spilled_pipeline
from tests.kit.training import adamw, momentum

pytestmark = pytest.mark.usefixtures("accelerator")

BATCHES = [make_batch(rows, seed=rows) for rows in (13, 16, 8)]


def trained(model, spill, devices=None, options=None, **plan):
    """(losses, weights, outputs), in main memory."""
    given = {"devices": devices, **(options or {})}
    with spilled_pipeline(model, spill, options=given, **plan) as pipeline:
        losses = [pipeline.step(*batch).cpu() for batch in BATCHES]
        return torch.stack(losses), pipeline.state_dict(), pipeline.evaluate(BATCHES[0][0]).cpu()


def assert_alike(ours, theirs):
    assert torch.equal(ours[0], theirs[0])
    assert_same_values(ours[1], theirs[1])
    assert torch.equal(ours[2], theirs[2])


CASES = [
    (tier, clip, recompute, group, ahead)
    for tier in ("host", "disk")
    for clip in (None, 0.05)
    for recompute in ("none", "stage", "layers")
    for group in (0, 1)
    for ahead in (1, 0, 2)
]


@pytest.mark.parametrize(("tier", "clip", "recompute", "group", "ahead"), in_turns(CASES, 9))
def test_what_comes_to_a_device_trains_as_what_stays(tmp_path, tier, clip, recompute, group, ahead):
    how = {"options": {"clip_norm": clip}, "recompute": recompute}
    where = HOST if tier == "host" else Tier(folder=str(tmp_path))
    ours = trained(make_net(), Spill(tier=where, ahead=ahead), "emu:1", group=group, **how)
    assert_alike(ours, trained(make_net(), None, "cpu", **how))


@pytest.mark.parametrize("devices", [["emu:0", "emu:2"], ["emu:1", "cpu"]], ids=str)
def test_two_ranks_wherever_they_compute(devices):
    plan = {"num_ranks": 2, "cuts": (1, 2, 3), "options": {"clip_norm": 0.05}}
    ours = trained(make_net(), Spill(tier=HOST), devices, **plan)
    assert_alike(ours, trained(make_net(), None, "cpu", **plan))


@pytest.mark.parametrize("make", [make_tied, lambda: make_net(frozen=True)])
def test_ties_frozen_weights_and_momentum(make):
    options = {"optimizer": momentum}
    ours = trained(make(), Spill(tier=HOST), "emu:3", options)
    assert_alike(ours, trained(make(), None, "cpu", options))


def test_a_loss_scale_and_updates_that_are_skipped():
    def train(spill, devices):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
        options = {"grad_scaler": scaler, "clip_norm": 0.5}
        return trained(make_net(), spill, devices, options), scaler.state_dict()

    (ours, scale), (theirs, same) = train(Spill(tier=HOST), "emu:1"), train(None, "cpu")
    assert scale == same
    assert_alike(ours, theirs)


def deep(width=128, layers=16):
    torch.manual_seed(0)
    body = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, width), *body, nn.Linear(width, 4))


def careful(parameters):
    """Without temporaries, which are not in the budget."""
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def test_a_device_with_no_more_memory_than_the_budget_trains(accelerator):
    """The plan's budget is what the device has; all at once does not go into it."""
    budget = 800_000
    inputs, targets = BATCHES[0]
    graph = pk.profile(deep(), inputs[:4], loss=F.cross_entropy, targets=targets[:4])
    cluster = pk.Cluster.local(1, tiers=[HOST])
    plan = pk.plan(graph, cluster, microbatches=4, memory_bytes=budget, schedule="spilled")
    found = []
    gc.collect()
    left = accelerator.memory_allocated(1)  # by tests before this one, in what still refers to it
    accelerator.set_memory_limit(budget + left, 1)
    options = {"loss": F.cross_entropy, "optimizer": careful, "seed": 3}
    for where in ("emu:1", "cpu"):
        model = deep()
        with pk.Pipeline(model, plan, devices=where, **options) as pipeline:
            losses = torch.stack([pipeline.step(*batch).cpu() for batch in BATCHES])
            if where == "emu:1":
                memory = residence_of(pipeline).buffers
                assert memory.peak_bytes <= memory.budget_bytes < budget
                assert all(parameter.isnan().all() for parameter in model.parameters())
            found.append((losses, pipeline.state_dict()))
    assert torch.equal(found[0][0], found[1][0])
    assert_same_values(found[0][1], found[1][1])
    everything = 4 * sum(parameter.nbytes for parameter in deep().parameters())
    assert everything > 4 * budget
    with (
        pytest.raises(torch.OutOfMemoryError),
        spilled_pipeline(deep(), None, options={"devices": "emu:1"}) as pipeline,
    ):
        pipeline.step(*BATCHES[0])


@pytest.mark.parametrize("clip", [None, 0.05])
def test_no_step_waits_for_the_device(accelerator, clip):
    options = {"clip_norm": clip, "devices": "emu:1"}
    with spilled_pipeline(make_net(), options=options) as pipeline:
        pipeline.step(*BATCHES[0])
        accelerator.reset_host_counts(1)
        accelerator.set_sync_debug_mode("error")
        losses = [pipeline.step(*batch) for batch in BATCHES]
        accelerator.set_sync_debug_mode("default")
        assert accelerator.host_reads(1) + accelerator.host_waits(1) == 0
        (row,) = pipeline.timeline.rows
        times = [time for pair in zip(row.starts, row.ends, strict=True) for time in pair]
        assert times == sorted(times)  # also where an op begins anew, since it has waited
        assert torch.stack(losses).isfinite().all()


def without(name):
    """A way to leave one kind of wait out."""
    if name == "ops wait for what comes":
        return transfers, "taken_up", lambda tensors, moment: None
    if name == "buffers wait for those who used them":
        return (
            buffers.MemoryBuffer,
            "free_after",
            property(lambda self: [], lambda self, moments: None),
        )
    original = SideStreams._copied

    def unordered(self, stream, target, source, on_device, behind):
        return original(self, stream, target, source, on_device, [])

    return SideStreams, "_copied", unordered


@pytest.mark.parametrize(
    "name",
    ["ops wait for what comes", "buffers wait for those who used them", "copies wait for ops"],
)
def test_each_wait_is_missed_where_it_is_left_out(monkeypatch, name):
    monkeypatch.setattr(*without(name), raising=False)
    with (
        pytest.raises((StageError, FileError, RuntimeError), match="race on"),
        spilled_pipeline(make_net(), options={"devices": "emu:1"}) as pipeline,
    ):
        for batch in BATCHES:
            pipeline.step(*batch)


def test_checkpoints_go_from_devices_and_back(tmp_path):
    options = {"clip_norm": 0.05, "optimizer": adamw}
    whole = trained(make_net(), None, "cpu", options)
    spill = Spill(tier=HOST)
    for number, (before, after) in enumerate((("emu:1", "cpu"), ("cpu", "emu:2"))):
        folder = tmp_path / str(number)
        with spilled_pipeline(
            make_net(), spill, options={**options, "devices": before}
        ) as pipeline:
            pipeline.step(*BATCHES[0])
            pipeline.save(folder)
        with spilled_pipeline(
            make_net(seed=9), spill, options={**options, "devices": after}
        ) as pipeline:
            assert pipeline.load(folder) == 1
            losses = [pipeline.step(*batch).cpu() for batch in BATCHES[1:]]
            assert torch.equal(torch.stack(losses), whole[0][1:])
            assert_same_values(pipeline.state_dict(), whole[1])


def test_models_that_were_never_in_memory_come_to_a_device():
    def meta():
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))

    assert_alike(trained(meta(), Spill(tier=HOST), "emu:1"), trained(meta(), None, "cpu"))


def test_a_step_that_failed_on_a_device_can_be_tried_again():
    model, picky = make_net(), Picky()
    model[2][0] = nn.Identity()  # statistics would keep what a failed step did to them
    other = make_net()
    other[2][0] = nn.Identity()
    model.insert(3, picky)
    other.insert(3, Picky())
    with spilled_pipeline(model, options={"devices": "emu:1"}) as pipeline:
        losses = []
        for batch in BATCHES:
            picky.fails = True
            with pytest.raises(StageError, match="RuntimeError: no"):
                pipeline.step(*batch)
            picky.fails = False
            losses.append(pipeline.step(*batch).cpu())
        state = pipeline.state_dict()
    with spilled_pipeline(other, None, options={"devices": "cpu"}) as pipeline:
        for batch in BATCHES:
            pipeline.step(*batch)
        assert_same_values(state, pipeline.state_dict())
