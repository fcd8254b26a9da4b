"""Activations that leave between forward and backward change no bit, whatever the schedule."""

from __future__ import annotations

import copy
import gc
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import DeadlineError, InputError, StageError
from penstock.core.schedule.memory import Sizes
from penstock.core.schedule.memory import peaks as schedule_peaks
from penstock.engine.weights.tiers import HostStore
from penstock.planning.plans.spilling import Offload, Spill, Tier, moved_activations
from tests.kit.examples import in_turns
from tests.kit.helpers import make_batch, make_plan
from tests.kit.one_device import assert_same_values
from tests.kit.spilling import HOST, Picky, spilled_plan
from tests.kit.training import DEADLINE_SECONDS, adamw, sgd

BATCHES = [make_batch(rows, seed=rows) for rows in (24, 21, 24)]


def planned(model, schedule, num_microbatches=8):
    num_ranks = 4 if schedule in ("1f1b", "gpipe", "zb-h1") else 2
    return make_plan(model, num_ranks, num_microbatches, schedule)


def net(seed=0):
    """Eight layers, among them one that draws, one with statistics, one that works in place."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.Sequential(nn.Tanh(), nn.Dropout(0.2)),
        nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 32)),
        nn.ReLU(inplace=True),
        nn.Linear(32, 48),
        nn.GELU(),
        nn.Linear(48, 24),
        nn.Linear(24, 4),
    )


def trained(model, plan, **options):
    """(losses, weights, outputs, bytes that left) in main memory."""
    given = {"loss": F.cross_entropy, "optimizer": adamw, "seed": 3, **options}
    with pk.Pipeline(model, plan, deadline_seconds=DEADLINE_SECONDS, **given) as pipeline:
        losses = [pipeline.step(*batch).cpu() for batch in BATCHES]
        losses += [loss.cpu() for loss in pipeline.steps(BATCHES)]
        state = {key: value.cpu() for key, value in pipeline.state_dict().items()}
        outputs = pipeline.evaluate(BATCHES[0][0]).cpu()
        offloadings = [worker.offloading for worker in pipeline._parts.workers]
        left = [one.transfers.path.space.written_bytes for one in offloadings if one is not None]
        return torch.stack(losses), state, outputs, sum(left)


def assert_alike(ours, theirs):
    assert torch.equal(ours[0], theirs[0])
    assert_same_values(ours[1], theirs[1])
    assert torch.equal(ours[2], theirs[2])
    assert ours[3] > 0 == theirs[3]


SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-v", "hanayo")
CASES = [
    (schedule, tier, ahead, clip)
    for schedule in SCHEDULES
    for tier in ("host", "disk")
    for ahead in (1, 0, 2)
    for clip in (None, 0.05)
]


@pytest.mark.parametrize(("schedule", "tier", "ahead", "clip"), in_turns(CASES, 9))
def test_activations_that_leave_change_no_bit(tmp_path, schedule, tier, ahead, clip):
    plan = planned(net(), schedule)
    where = HOST if tier == "host" else Tier(folder=str(tmp_path))
    away = plan.offloading(Offload(tier=where, ahead=ahead))
    assert_alike(trained(net(), away, clip_norm=clip), trained(net(), plan, clip_norm=clip))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clip", [None, 0.05])
def test_weights_and_activations_may_leave_together(clip):
    model = net()
    plan = spilled_plan(model, 8, Spill(tier=HOST), num_ranks=2, cuts=(2, 4, 6), group=4)
    both = plan.offloading(Offload(tier=HOST, stages=(0, 1)))
    assert_alike(trained(net(), both, clip_norm=clip), trained(net(), plan, clip_norm=clip))


def test_on_accelerators_too(accelerator):
    plan = planned(net(), "1f1b")
    for tier in (HOST, Tier()):
        away = plan.offloading(Offload(tier=tier))
        ours = trained(net(), away, devices=["emu:0", "emu:1", "emu:2", "cpu"])
        assert_alike(ours, trained(net(), plan, devices="cpu"))


class Wide(nn.Module):
    """Keeps a hundred times as much as it is given, so that borders count for little."""

    def __init__(self, width=64, copies=100):
        super().__init__()
        self.spread, self.gather = (
            nn.Linear(width, copies * width),
            nn.Linear(copies * width, width),
        )

    def forward(self, value):
        return value + self.gather(self.spread(value).tanh())


def test_memory_is_what_the_order_says():
    """Of the first rank of 1F1B: all four that are in flight, or the two that passes work on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(4)))
    inputs = torch.randn(32, 64)
    plan = make_plan(model, 4, 8)
    peaks = []
    for given in (plan, plan.offloading(Offload(tier=HOST))):
        with pk.Pipeline(
            model, given, loss=F.mse_loss, optimizer=adamw, count_memory=True
        ) as pipeline:
            pipeline.step(inputs, inputs)
            peaks.append([peak.activation_bytes for peak in pipeline.peaks])
    microbatch = peaks[0][-1]  # the last rank keeps one at a time
    for given, measured in zip((plan, plan.offloading(Offload())), peaks, strict=True):
        order = given.build_schedule()
        expected = schedule_peaks(order.ranks, Sizes((microbatch,) * 4))
        for rank in range(4):
            assert measured[rank] == pytest.approx(expected[rank], rel=0.05)
    assert peaks[1][0] < 0.55 * peaks[0][0]


def test_a_device_needs_less_memory(accelerator):
    """No more than the two microbatches that the first rank works on, of four."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(4)))
    inputs = torch.randn(256, 64)
    plan = make_plan(model, 4, 8)
    peaks = []
    for given in (plan, plan.offloading(Offload(tier=HOST))):
        devices = [f"emu:{rank}" for rank in range(4)]
        with pk.Pipeline(
            copy.deepcopy(model), given, loss=F.mse_loss, optimizer=sgd, devices=devices
        ) as pipeline:
            pipeline.step(inputs, inputs)
            gc.collect()  # what tests before this one have left
            before = accelerator.memory_allocated(0)
            accelerator.reset_peak_memory_stats(0)
            pipeline.step(inputs, inputs)
            peaks.append(accelerator.max_memory_allocated(0) - before)
    kept = 32 * 64 * 100 * 4  # of a microbatch: what tanh gives
    assert peaks[0] - peaks[1] == pytest.approx(2 * kept, rel=0.1)


def test_a_step_that_failed_can_be_tried_again():
    def train(offload):
        torch.manual_seed(0)
        picky = Picky()
        model = nn.Sequential(
            nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), picky, nn.GELU(), nn.Linear(32, 4)
        )
        plan = make_plan(model, 2, 8).offloading(offload)
        options = {"loss": F.cross_entropy, "optimizer": adamw}
        with pk.Pipeline(model, plan, **options) as pipeline:
            for batch in BATCHES:
                picky.fails = offload is not None
                if picky.fails:
                    with pytest.raises(StageError, match="RuntimeError: no"):
                        pipeline.step(*batch)
                picky.fails = False
                pipeline.step(*batch)
            return pipeline.state_dict()

    assert_same_values(train(Offload(tier=HOST, ahead=0)), train(None))


def test_what_somebody_overwrites_is_told_as_if_it_had_stayed():
    class Careless(nn.Module):
        def forward(self, value):
            squared = value * value
            value.zero_()
            return squared

    model = nn.Sequential(nn.Linear(16, 8), Careless(), nn.Linear(8, 8), nn.Linear(8, 4))
    plan = make_plan(model, 2, 8).offloading(Offload(tier=HOST, ahead=0))
    with (
        pk.Pipeline(model, plan, loss=F.cross_entropy, optimizer=adamw) as pipeline,
        pytest.raises(StageError, match="modified by an inplace operation"),
    ):
        pipeline.step(*BATCHES[0])


class Stalled(HostStore):
    """Never gives back what it was given."""

    def _get(self, extent, start, memory):
        time.sleep(1.5)
        super()._get(extent, start, memory)


def test_a_tier_that_does_not_answer_or_loses_a_bit_is_told(monkeypatch, tmp_path):
    model = net()
    plan = planned(model, "1f1b").offloading(Offload(tier=HOST))
    monkeypatch.setattr("penstock.engine.weights.data_paths.opened", lambda tier: Stalled())
    options = {"loss": F.cross_entropy, "optimizer": adamw, "deadline_seconds": 0.5}
    with (
        pk.Pipeline(model, plan, **options) as pipeline,
        pytest.raises(DeadlineError, match=r"activations of microbatch \d of stage \d have not"),
    ):
        pipeline.step(*BATCHES[0])

    class Forgetful(HostStore):
        def _get(self, extent, start, memory):
            super()._get(extent, start, memory)
            memory[100] ^= 4

    monkeypatch.setattr("penstock.engine.weights.data_paths.opened", lambda tier: Forgetful())
    with (
        pk.Pipeline(net(), plan, loss=F.cross_entropy, optimizer=adamw) as pipeline,
        pytest.raises(StageError, match=r"B\d: FileError: activations .* not what was written"),
    ):
        pipeline.step(*BATCHES[0])


def test_a_rehearsal_has_no_tier():
    plan = planned(net(), "1f1b").offloading(Offload(tier=HOST))
    with pytest.raises(InputError, match="activations of this plan wait in a tier"):
        pk.rehearse(plan)


def test_what_is_moved_is_what_the_plan_says():
    """But for borders: 2 × 8 of the microbatches of three ranks leave, in whole pages."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(4)))
    inputs = torch.randn(32, 64)
    graph = pk.profile(model, inputs[:4], loss=F.mse_loss, targets=inputs[:4])
    cluster = pk.Cluster.local(4)
    plan = pk.plan(graph, cluster, microbatches=8, schedule="1f1b", stages=4, recompute="never")
    plan = plan.offloading(Offload(tier=HOST))
    with pk.Pipeline(model, plan, loss=F.mse_loss, optimizer=adamw) as pipeline:
        for _ in range(2):
            pipeline.step(inputs, inputs)
        spaces = [worker.offloading.transfers.path.space for worker in pipeline._parts.workers]
    expected = 2 * moved_activations(plan.build_schedule(), plan.stages)
    assert sum(space.written_bytes for space in spaces) == pytest.approx(expected, rel=0.1)
    assert sum(space.read_bytes for space in spaces) == sum(s.written_bytes for s in spaces)
