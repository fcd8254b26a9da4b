"""Many models at once: each has the bits of training it alone, whatever the others do."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import DeadlineError, FileError, InputError
from penstock.planning.plans.spilling import Spill
from penstock.planning.turns import POLICIES
from penstock.training.fleet.dispatcher import JobPlace
from penstock.training.fleet.results import FleetDisplay
from tests.kit.spilling import HOST, make_net, make_tied, spilled_plan
from tests.kit.training import adamw

NUM_BATCHES = 4


def batches(seed, count=NUM_BATCHES):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(count)
    ]


def job(seed, model=None, *, data=None, spill=Spill(tier=HOST), steps=None, **options):  # noqa: B008
    model = make_net(seed) if model is None else model
    return pk.Job(
        model,
        spilled_plan(model, spill=spill),
        batches(seed) if data is None else data,
        loss=F.cross_entropy,
        optimizer=adamw,
        seed=seed,
        steps=steps,
        **options,
    )


def mixed_jobs():
    """Some fit, some come and go; with dropout, clipping, ties, one stage ahead or none."""
    return {
        "fits": job(0, spill=None),
        "spilled": job(1),
        "clipped": job(2, clip_norm=0.5),
        "tied": job(3, make_tied(3)),
        "waits": job(4, spill=Spill(tier=HOST, ahead=0)),
    }


def alone(of, num_steps):
    """(losses, state) of a job's model, trained by itself."""
    with of.build() as pipeline:
        pairs = itertools.islice(of.batches(0, None), num_steps)
        losses = [float(pipeline.step(*pair)) for pair in pairs]
        return losses, pipeline.state_dict()


def assert_same(results, fleet, name, expected):
    losses, state = expected
    assert list(results[name].losses) == losses
    trained = fleet.pipelines[name].state_dict()
    assert all(torch.equal(trained[key], state[key]) for key in state)


@pytest.fixture(scope="module")
def expected():
    return {name: alone(one, 6) for name, one in mixed_jobs().items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_each_job_is_what_it_is_alone(policy, expected):
    with pk.Fleet(mixed_jobs(), devices=2, policy=policy) as fleet:
        results = fleet.run(steps=6)
        for name in expected:
            assert results[name].status == "done"
            assert_same(results, fleet, name, expected[name])
    turns = results.timeline
    assert turns.source == "measured"
    for row in turns.by_device:
        assert all(one.end <= other.start for one, other in itertools.pairwise(row))
    num_visits = {"fits": 9, "spilled": 9, "clipped": 9, "tied": 11, "waits": 9}
    for name, count in num_visits.items():
        own = [turn for turn in turns.turns if turn.job == name]
        assert len(own) == 6 * count
        assert all(one.end <= other.start for one, other in itertools.pairwise(own))
        assert policy != "whole" or len({turn.device for turn in own}) == 1


class Breaks(nn.Module):
    """Raises, gives NaN or hangs in its n-th forward of training."""

    def __init__(self, how, forward):
        super().__init__()
        self.how, self.forwards_left = how, forward
        self.goes_on = threading.Event()

    def forward(self, value):
        self.forwards_left -= 1
        if self.forwards_left == 0:
            if self.how == "raise":
                raise ArithmeticError("broken layer")
            if self.how == "hang":
                assert self.goes_on.wait(60)
            return value * float("nan")
        return value


def test_what_fails_hangs_or_is_nan_ends_alone(expected):
    """Also in a stage that comes and goes, and while others wait for the device."""
    models = {}
    for how in ("raise", "nan", "hang"):
        models[how] = make_net(7)
        models[how][2].append(Breaks(how, 10))
    jobs = {name: one for name, one in mixed_jobs().items() if name in ("fits", "clipped")}
    jobs |= {how: job(7, model) for how, model in models.items()}
    # One of them reaches it; on a loaded machine the others must not.
    with pk.Fleet(jobs, devices=2, deadline_seconds=6) as fleet:
        results = fleet.run(steps=6)
        for name in ("fits", "clipped"):
            assert_same(results, fleet, name, expected[name])
        statuses = {how: results[how].status for how in models}
        assert statuses == {"raise": "failed", "nan": "not a number", "hang": "failed"}
        assert "broken layer" in str(results["raise"].error)
        assert isinstance(results["hang"].error, DeadlineError)
        assert "step 2" in str(results["hang"].error)
        assert all(results[how].steps == 2 for how in models)
        assert results.timeline.ended["raise"] == "failed at step 2"
        # What has failed stays so; the others go on.
        models["hang"][2][-1].goes_on.set()
        again = fleet.run(steps=7)
        assert again["fits"].steps == 7
        assert again["raise"].steps == 2


def test_what_cannot_be_built_ends_alone(expected, tmp_path):
    """A function that raises, and a plan for another model; the others go on, and are saved."""

    def broken():
        raise ArithmeticError("no such weights")

    plan = spilled_plan(make_net())
    options = {"loss": F.cross_entropy, "optimizer": adamw}
    jobs = {
        "raises": pk.Job(broken, plan, batches(0), **options),
        "fits": job(0, spill=None),
        "other": pk.Job(nn.Linear(2, 2), plan, batches(0), **options),
        "clipped": job(2, clip_norm=0.5),
    }
    with (
        pytest.warns(UserWarning, match="job raises: no such weights .*the others go on"),
        pytest.warns(UserWarning, match="^job other: .*the others go on"),
    ):
        fleet = pk.Fleet(jobs, devices=2)
    with fleet:
        results = fleet.run(steps=6)
        assert [*results] == [*jobs]
        for name in ("fits", "clipped"):
            assert_same(results, fleet, name, expected[name])
        assert {results[name].status for name in ("raises", "other")} == {"failed"}
        assert "no such weights" in str(results["raises"].error)
        assert results["raises"].steps == 0
        assert "failed" in str(results)
        fleet.save(tmp_path)
        assert {folder.name for folder in tmp_path.iterdir()} == {"fits", "clipped"}
        assert set(fleet.simulate(steps=6).jobs) == {"fits", "clipped"}
    jobs = {name: one for name, one in jobs.items() if name in ("raises", "other")}
    with pytest.raises(ArithmeticError, match="no such weights"):
        pk.Fleet(jobs)
    # Halving decides among those that are left, as if the others had failed in their first step.
    three = {"a": job(1), "b": job(2), "gone": pk.Job(broken, plan, batches(0), **options)}
    with pytest.warns(UserWarning, match="job gone"):
        fleet = pk.Fleet(three)
    with fleet:
        statuses = {one.status for one in fleet.run(pk.stop.halving(every=2)).values()}
        assert statuses == {"failed", "done", "stopped"}


def test_halving_keeps_the_better_half_and_resumes(tmp_path, expected):
    stop = pk.stop.halving(every=2)
    jobs = {f"j{seed}": job(seed) for seed in range(5)}
    losses = {name: alone(one, 6)[0] for name, one in jobs.items()}

    def survivors(names, first):
        means = {name: sum(losses[name][first : first + 2]) / 2 for name in names}
        return sorted(means, key=means.get)[: -(-len(names) // 2)]

    three = survivors(sorted(jobs), 0)
    two = survivors(sorted(three), 2)
    (one,) = survivors(sorted(two), 4)
    steps = {name: 6 if name in two else 4 if name in three else 2 for name in jobs}
    with pk.Fleet({name: job(int(name[1])) for name in jobs}) as fleet:
        results = fleet.run(stop)
    assert {name: result.steps for name, result in results.items()} == steps
    assert [name for name in jobs if results[name].status == "done"] == [one]
    assert results.best.name == one
    assert all(list(results[name].losses) == losses[name][: steps[name]] for name in jobs)

    # The same, interrupted in the third minibatch of a job, and gone on from in another process's
    # place: all that is left is in the folder.
    broken = make_net(int(two[0][1]))
    failing = {name: job(int(name[1])) for name in jobs}
    failing[two[0]] = job(int(two[0][1]), broken, data=_interrupted(int(two[0][1]), 4))
    with pk.Fleet(failing) as fleet:
        failed = fleet.run(stop, folder=tmp_path, every=1)
        assert failed[two[0]].status == "failed"
    with pk.Fleet({name: job(int(name[1])) for name in jobs}) as fleet:
        resumed = fleet.run(stop, folder=tmp_path, every=1)
    assert {name: result.losses for name, result in resumed.items() if name in two} == {
        name: result.losses for name, result in results.items() if name in two
    }
    assert resumed.best.name == one


def _interrupted(seed, after):
    def epoch(number):
        for index, pair in enumerate(batches(seed)):
            if number * NUM_BATCHES + index == after:
                raise OSError("unplugged")
            yield pair

    return epoch


def test_interrupted_it_ends_at_once_and_resumes_to_the_same_losses(
    tmp_path, monkeypatch, expected
):
    names = ("clipped", "fits", "spilled")
    jobs = {name: one for name, one in mixed_jobs().items() if name in names}

    def update(table):
        if any(trainee.step >= 2 for trainee in table._trainees):
            raise KeyboardInterrupt

    with pk.Fleet(jobs, devices=2) as fleet, monkeypatch.context() as patch:
        patch.setattr(FleetDisplay, "update", update)
        with pytest.raises(KeyboardInterrupt):
            fleet.run(steps=200, folder=tmp_path, every=1)
        assert not [one for one in threading.enumerate() if one.name.startswith("penstock job")]
        assert "the fleet was interrupted" in str(fleet.run(steps=6)["clipped"].error)
    jobs = {name: one for name, one in mixed_jobs().items() if name in names}
    with pk.Fleet(jobs, devices=2) as fleet:
        assert max(fleet.load(tmp_path).values()) >= 1
        results = fleet.run(steps=6, folder=tmp_path, every=4)
        for name in names:
            if results[name].steps == 6:
                assert_same(results, fleet, name, expected[name])
            assert list(results[name].losses[:6]) == expected[name][0]


def test_saved_and_loaded_it_goes_on_to_the_same_bits(tmp_path, expected):
    with pk.Fleet(mixed_jobs(), devices=1) as fleet:
        fleet.run(steps=3)
        fleet.save(tmp_path)
    with pk.Fleet(mixed_jobs(), devices=3) as fleet:
        assert set(fleet.load(tmp_path).values()) == {3}
        results = fleet.run(steps=6)
        for name in expected:
            assert_same(results, fleet, name, expected[name])
    with pk.Fleet({"spilled": job(1)}) as fleet:
        fleet.pipelines["spilled"].save(tmp_path / "mine" / "spilled", background=False)
        with pytest.raises(FileError, match="no fleet has written"):
            fleet.load(tmp_path / "mine")


class Napping(nn.Module):
    """Works for a while without a core."""

    def forward(self, value):
        time.sleep(0.004)
        return value


def test_measured_it_ends_within_a_unit_of_the_bound():
    """Of the visits as long as they were, so that a busy machine changes both sides."""

    def napping(seed, count):
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(16, 16), Napping()) for _ in range(3)]
        return job(seed, nn.Sequential(*layers), steps=count)

    jobs = {f"j{seed}": napping(seed, 2 + seed) for seed in range(4)}
    with pk.Fleet(jobs, devices=2) as fleet:
        results = fleet.run()
        assert [turn.job for turn in fleet.simulate().turns].count("j3") == 5 * 5
    took, least = results.timeline.makespan, results.bound
    assert took <= 1.15 * (least.seconds + least.unit)
    assert took >= least.seconds


def test_a_slow_loader_keeps_no_device():
    """One device, and the first job waits for data that comes when the other job has ended."""
    ended = threading.Event()

    def slow(epoch):
        yield from batches(0)[:2]  # one is taken ahead
        assert ended.wait(10)
        yield from batches(0)[2:]

    def quick(epoch):
        yield from batches(1, 5)
        ended.set()
        yield from batches(1, 5)

    jobs = {"slow": job(0, data=slow, steps=4), "quick": job(1, data=quick, steps=10)}
    with pk.Fleet(jobs, devices=1, policy="fair", deadline_seconds=300) as fleet:
        results = fleet.run()
    assert {result.status for result in results.values()} == {"done"}


def test_what_loaders_draw_belongs_to_their_job():
    """Shuffling with torch's default generator, which all threads share."""

    def shuffled(seed):
        loader = torch.utils.data.DataLoader(batches(seed), shuffle=True, batch_size=None)
        return job(seed, data=loader)

    def orders(devices, number):
        with pk.Fleet({f"j{seed}": shuffled(seed) for seed in range(3)}, devices) as fleet:
            torch.manual_seed(number)
            return {name: one.losses for name, one in fleet.run(epochs=2).items()}

    assert orders(1, 0) == orders(3, 1)


def test_what_a_fleet_refuses():
    plan = spilled_plan(make_net())
    given = {"loss": F.cross_entropy, "optimizer": adamw}
    shared = make_net()
    two_ranks = spilled_plan(make_net()[:4], spill=None, num_ranks=2)
    for plan_, data, options, match in (
        (two_ranks, [], {}, "2 ranks.*plan it for one device"),
        (plan, iter([]), {}, "gone through once only"),
        (plan, [], {"steps": 0}, "steps is 0"),
        (plan, [], {"devices": "cpu"}, "'devices'; a fleet decides"),
        (plan, [], {"clip": 1.0}, "no option 'clip'.*clip_norm"),
    ):
        with pytest.raises(InputError, match=match):
            pk.Job(make_net(), plan_, data, **given, **options)
    for jobs, match in (
        ({}, "at least one job"),
        ({"a/b": job(0)}, "no job can be called 'a/b'"),
        ({"a": 3}, "job a is of type int"),
        ({"a": pk.Job(nn.Linear(2, 2), plan, [], **given)}, "job a: "),
        ({"a": job(0, shared), "b": job(1), "c": job(2, shared)}, "a and c train the same"),
    ):
        with pytest.raises(InputError, match=match):
            pk.Fleet(jobs)
    with pk.Fleet({"a": job(0, data=lambda epoch: [])}) as fleet:
        for run, match in (
            ({}, "nobody says how long"),
            ({"steps": 3, "epochs": 1}, "give one of them"),
            ({"steps": 0}, "steps is 0"),
            ({"stop": pk.stop.halving("accuracy", every=2)}, "no metric 'accuracy'.*take loss"),
        ):
            with pytest.raises(InputError, match=match):
                fleet.run(**run)
        with pytest.raises(InputError, match="has no len"):
            fleet.simulate(epochs=2)
        assert "has no minibatch" in str(fleet.run(steps=3)["a"].error)
        with pytest.raises(InputError, match="no job came to its end"):
            _ = fleet.run(steps=3).best
    with pytest.raises(InputError, match="is closed"):
        fleet.run(steps=3)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_next_visit_is_fetched_meanwhile_and_few_wait_with_a_stage(num_devices, monkeypatch):
    """Of each visit of a stage that comes: when its fetch began, and how many jobs had one then.
    Jobs go by the plan alone, or guesses would depend on how busy the machine is."""
    monkeypatch.setattr(JobPlace, "reckon", lambda place: None)
    jobs = {f"j{seed}": job(seed) for seed in range(4)}
    with pk.Fleet(jobs, num_devices) as fleet:
        began = {name: [] for name in jobs}
        held = []

        def watch(name, residence):
            fetch = residence.fetch

            def noted(stage, stay):
                fetch(stage, stay)
                began[name].append(time.perf_counter())
                held.append(sum(map(_has_fetched, fleet.pipelines.values())))

            residence.fetch = noted

        for name, pipeline in fleet.pipelines.items():
            watch(name, pipeline._parts.workers[0].residence)
        turns = fleet.run(steps=6).timeline.turns
        start = fleet._dispatcher._start
    early = late = 0
    for name, moments in began.items():
        own = [turn for turn in turns if turn.job == name]
        assert len(moments) == len(own)  # a fetch for each visit, the first stage's of no effect
        for moment, turn in zip(moments, own, strict=True):
            early += moment - start < turn.start
            late += moment - start >= turn.start
    # What nobody guesses: each job's very first fetch, and that of the first stage, which stays.
    assert early >= 0.6 * (early + late)
    # Visits that are under way, for each device one to come, and where that was a wrong guess; now
    # and then a second wrong guess waits beside it.
    assert 3 * num_devices < len(jobs) * num_devices
    assert sum(count > 3 * num_devices for count in held) <= 0.2 * len(held)


def _has_fetched(pipeline):
    residence = pipeline._parts.workers[0].residence
    groups = [group for stage in residence.stages[1:] for group in residence._weights[stage]]
    return any(group.buffer is not None for group in groups)


def test_jobs_that_wait_hand_their_memory_on():
    """Six equal jobs on one device have less in memory than three would by themselves."""
    jobs = {f"j{seed}": job(seed) for seed in range(6)}
    with pk.Fleet(jobs, devices=1) as fleet:
        buffers = [pipe._parts.workers[0].residence.buffers for pipe in fleet.pipelines.values()]
        mapped = []
        for one in buffers:
            _after_each_take(one, lambda: mapped.append(sum(each.mapped_bytes for each in buffers)))
        fleet.run(steps=4)
    kept = sum(p.nbytes for p in make_net()[0].parameters())  # the first stage's weights stay
    by_itself = max(one.peak_bytes for one in buffers)
    assert max(mapped) <= len(jobs) * kept + 2.5 * by_itself
    assert all(one.peak_bytes <= one.budget_bytes for one in buffers)


def _after_each_take(buffers, note):
    take = buffers.take

    def noted(num_bytes, whose):
        buffer = take(num_bytes, whose)
        note()
        return buffer

    buffers.take = noted
