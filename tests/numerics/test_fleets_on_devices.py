"""Many models at once on accelerators: each stays on one, and has the bits of training it alone on
the CPU; memory that jobs hand on to each other is written when nobody works on it any more."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
import torch
from torch import nn

import penstock as pk
from penstock.base.errors import InputError
from penstock.engine.device.queue import AcceleratorQueue
from penstock.engine.weights import buffers
from penstock.planning.plans.spilling import Spill, Tier
from tests.kit.spilling import make_net
from tests.numerics.test_fleets import alone, job, mixed_jobs

pytestmark = pytest.mark.usefixtures("accelerator")

NUM_STEPS = 3


@cache
def expected(name):
    """(losses, state) of one of the mixed jobs, trained by itself on the CPU."""
    return alone(mixed_jobs()[name], NUM_STEPS)


def assert_as_alone(fleet, results, names):
    for name in names:
        losses, state = expected(name)
        assert results[name].error is None
        assert list(results[name].losses) == losses
        trained = fleet.pipelines[name].state_dict()
        assert all(torch.equal(trained[key].cpu(), state[key]) for key in state)


@pytest.mark.parametrize("devices", [["emu:1", 3], ["emu:2", "emu:2"]], ids=str)
def test_each_job_is_what_it_is_alone_on_the_cpu(devices, accelerator):
    with pk.Fleet(mixed_jobs(), devices, policy="fair") as fleet:
        accelerator.reset_host_counts(1)
        results = fleet.run(steps=NUM_STEPS)
        turns = results.timeline.turns
        on_first = sum(turn.device == 0 for turn in turns)
        # A device goes to the next job when it has done what it was asked for.
        assert "emu:1" not in devices or accelerator.host_waits(1) >= on_first
        assert_as_alone(fleet, results, mixed_jobs())
    used = {name: {turn.device for turn in turns if turn.job == name} for name in results}
    assert all(len(own) == 1 for own in used.values())
    assert set.union(*used.values()) == set(range(len(devices)))


def test_a_disk_as_tier_and_the_first_accelerators_by_default(tmp_path):
    tier = Tier(folder=str(tmp_path))
    jobs = {"spilled": job(1, spill=Spill(tier=tier)), "clipped": job(2, clip_norm=0.5)}
    for one in jobs.values():
        gpu = pk.Device(name="emu", kind="gpu", memory_bytes=1 << 30)
        one.plan = msgspec.structs.replace(one.plan, devices=(gpu,))
    with pk.Fleet(jobs, devices=2) as fleet:
        results = fleet.run(steps=NUM_STEPS)
        where = {p._parts.workers[0].queue.device.index for p in fleet.pipelines.values()}
        assert where == {0, 1}
        assert_as_alone(fleet, results, jobs)
    with pytest.raises(InputError, match="of 5 this machine has 4"):
        pk.Fleet(jobs, devices=5)
    with pytest.raises(InputError, match="job spilled is planned for an accelerator and job c"):
        pk.Fleet({**jobs, "c": job(1)})
    with pytest.raises(InputError, match="some are cores and others accelerators"):
        pk.Fleet({"a": job(1)}, ["cpu", "emu:1"])
    with pytest.raises(InputError, match="'emu:9' is not here"):
        pk.Fleet({"a": job(1)}, ["emu:9"])


class Nothing(nn.Module):
    """Gives NaN in one forward."""

    def __init__(self, forward):
        super().__init__()
        self.forwards_left = forward

    def forward(self, value):
        self.forwards_left -= 1
        return value * float("nan") if self.forwards_left == 0 else value


def test_what_fails_on_a_device_ends_alone():
    """Losses are looked at when they have been learned from: nobody waits for them before."""
    broken, no_number = make_net(7), make_net(8)
    broken[2].append(nn.Linear(1, 1))
    no_number[2].append(Nothing(10))
    jobs = {"broken": job(7, broken), "nan": job(8, no_number), "clipped": job(2, clip_norm=0.5)}
    with pk.Fleet({"fits": job(0, spill=None), **jobs}, ["emu:1"]) as fleet:
        results = fleet.run(steps=NUM_STEPS)
        statuses = {name: result.status for name, result in results.items()}
        assert statuses == {
            "fits": "done", "broken": "failed", "nan": "not a number", "clipped": "done",
        }  # fmt: skip
        assert results["nan"].steps == 3  # that loss included
        assert "step 2 is nan, and has been learned from" in str(results["nan"].error)
        assert_as_alone(fleet, results, ("fits", "clipped"))


def test_halving_saves_and_resumes_on_devices(tmp_path):
    def jobs():
        return {f"j{seed}": job(seed) for seed in range(3)}

    with pk.Fleet(jobs(), ["emu:1", "emu:2"]) as fleet:
        whole = fleet.run(pk.stop.halving(every=2))
    with pk.Fleet(jobs(), ["emu:3"]) as fleet:
        fleet.run(steps=1)
        fleet.save(tmp_path)
    with pk.Fleet(jobs(), ["emu:0", "emu:1"]) as fleet:
        assert set(fleet.load(tmp_path).values()) == {1}
        resumed = fleet.run(pk.stop.halving(every=2))
    assert {name: one.losses for name, one in resumed.items()} == {
        name: one.losses for name, one in whole.items()
    }


def test_a_missing_wait_before_memory_is_handed_on_is_found(monkeypatch):
    """Buffers that forget who still works on them: the accelerator proves the order."""
    monkeypatch.setattr(
        buffers.MemoryBuffer, "free_after", property(lambda _: [], lambda *_: None), False
    )
    monkeypatch.setattr(AcceleratorQueue, "moment", lambda _: None)
    with pk.Fleet({f"j{seed}": job(seed) for seed in range(2)}, ["emu:1"]) as fleet:
        results = fleet.run(steps=2)
    assert any("race on" in str(result.error) for result in results.values())
