"""Updates that do not wait for slow copies: they are what the journal says, to the bit."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LinearLR

import penstock as pk
from penstock.base.errors import InputError
from penstock.core.summation.staleness import Contribution, StaleStream
from penstock.trial import prove
from penstock.trial.proof import copies_of
from penstock.trial.reference.stale_replay import StaleReplay
from tests.kit.examples import examples
from tests.kit.helpers import Lambda, Net, make_batch, make_mlp
from tests.kit.reducing import replicated
from tests.kit.small_workload import workload
from tests.kit.training import DEADLINE_SECONDS, adamw

PAUSE_SECONDS = 0.03


def slow_on(slow):
    """A layer that keeps some ranks waiting in every microbatch."""

    def wait(value):
        if threading.current_thread().name in {f"penstock rank {rank}" for rank in slow}:
            time.sleep(PAUSE_SECONDS)
        return value

    return Lambda(wait)


def model_with(slow=()):
    return Net(slow_on(slow), *make_mlp(), Lambda(lambda value: value))


def stale_plan(model, replicas, stale):
    return replicated(model, replicas).with_reducer("parameter-server", stale=stale)


def scheduled(optimizer):
    return LinearLR(optimizer, total_iters=5)


def trained(plan, model, batches, **options):
    """(losses, journal) of one stream."""
    with pk.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=adamw, seed=3, transport="threads",
        lr_scheduler=scheduled, deadline_seconds=DEADLINE_SECONDS, **options,
    ) as pipeline:  # fmt: skip
        losses = list(pipeline.steps(batches))
        return losses, pipeline.stale_streams


def replay_of(plan, model):
    return StaleReplay(
        model, [len(stage.layers) for stage in plan.stages], plan.num_microbatches,
        F.cross_entropy, adamw, lr_scheduler=scheduled, seed=3,
        copy_of=copies_of(plan),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("replicas", "slow", "stale"), [((3,), [1], 2), ((1, 2), [2], 1), ((2, 2), [0, 3], 3)]
)
def test_a_stream_is_what_its_journal_says_to_the_bit(replicas, slow, stale):
    model, twin = model_with(slow), model_with()
    plan = stale_plan(model, replicas, stale)
    batches = [make_batch(24 - 20 * (k == 3), seed=k) for k in range(8)]
    losses, journal = trained(plan, model, batches)
    wanted = replay_of(plan, twin).train(batches, journal)
    assert losses == wanted
    ours, theirs = model.state_dict(), twin.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    delays = [delay for stream in journal.values() for delay in stream.delays.values()]
    assert 0 <= min(delays) <= max(delays) <= stale
    assert any(delays) or len(replicas) > 1  # alone, nobody waits for the slow one
    assert all(len(stream.updates) == len(batches) for stream in journal.values())


@pytest.mark.soak
@examples(6)
@given(data=st.data())
def test_any_stream_is_what_its_journal_says(data):
    replicas = data.draw(st.sampled_from([(2,), (4,), (1, 3), (3, 1), (2, 2), (2, 1, 2)]))
    stale, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 10))
    chances = [random.Random(data.draw(st.integers(0, 999))) for _ in range(sum(replicas))]

    def pauses(value):
        name = threading.current_thread().name
        if name.startswith("penstock rank"):
            time.sleep(0.01 * chances[int(name.split()[-1])].choice([0, 0, 0, 1, 3]))
        return value

    model, twin = Net(Lambda(pauses), *make_mlp(), Lambda(pauses)), model_with()
    plan = stale_plan(model, replicas, stale)
    batches = [make_batch(data.draw(st.integers(1, 24)), seed=k) for k in range(count)]
    losses, journal = trained(plan, model, batches)
    assert losses == replay_of(plan, twin).train(batches, journal)
    ours, theirs = model.state_dict(), twin.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    assert max(delay for one in journal.values() for delay in one.delays.values()) <= stale


def test_a_step_alone_is_synchronous():
    model, twin = model_with([1]), model_with()
    plan = stale_plan(model, (3,), 2)
    for own, its_plan in ((model, plan), (twin, plan.with_reducer("owners"))):
        with pk.Pipeline(
            own, its_plan, loss=F.cross_entropy, optimizer=adamw, seed=3, transport="threads"
        ) as pipeline:
            for seed in range(2):
                pipeline.step(*make_batch(24, seed=seed))
    ours, theirs = model.state_dict(), twin.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


@pytest.mark.parametrize("taken", [2, 5])
def test_a_loop_that_is_left_ends_with_all_gradients_applied(tmp_path, taken):
    model, twin = model_with([1]), model_with()
    plan = stale_plan(model, (2,), 2)
    batches = [make_batch(24, seed=k) for k in range(6)]
    options = {"loss": F.cross_entropy, "optimizer": adamw, "seed": 3, "transport": "threads"}
    with pk.Pipeline(model, plan, **options) as pipeline:
        for _ in itertools.islice(pipeline.steps(batches), taken):
            pass
        journal = pipeline.stale_streams
        first = journal[0].updates
        pipeline.save(tmp_path)
        list(pipeline.steps(batches[4:]))
        second = pipeline.stale_streams
    done = 1 + max(contribution.minibatch for own in first for contribution in own)
    assert sorted(itertools.chain(*first)) == [
        Contribution(k, copy) for k in range(done) for copy in range(2)
    ]
    replay = StaleReplay(
        twin, [len(plan.stages[0].layers)], plan.num_microbatches, F.cross_entropy, adamw,
        seed=3, copy_of=copies_of(plan),
    )  # fmt: skip
    replay.train(batches[:done], journal)
    replay.train(batches[4:], second)
    ours, theirs = model.state_dict(), twin.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


def paused():
    return dataclasses.replace(workload(), build_model=lambda: model_with([1]))


def test_a_stale_plan_is_proven_by_its_journal():
    found = prove(paused(), stale_plan(model_with(), (3,), 2), resume=True)
    assert found.equal and found.exact, found.verdict
    assert found.expected == "equal to the bit"
    assert re.fullmatch(r"the replay of its journal, .* up to [12] updates? late", found.reference)


def test_a_journal_that_tells_something_else_is_found_out(monkeypatch):
    told = pk.Pipeline.stale_streams.fget

    def otherwise(pipeline):
        return {
            stage: StaleStream([own[::-1] for own in stream.updates], stream.reads)
            for stage, stream in told(pipeline).items()
        }

    monkeypatch.setattr(pk.Pipeline, "stale_streams", property(otherwise))
    found = prove(paused(), stale_plan(model_with(), (3,), 2))
    assert not found.equal


def test_who_fails_is_named_and_nobody_hangs():
    trouble = [ValueError("broken")]

    def breaks(value):
        if threading.current_thread().name == "penstock rank 1" and trouble:
            raise trouble.pop()
        return value

    model = Net(*make_mlp(), Lambda(breaks))
    plan = stale_plan(model, (3,), 2)
    options = {"loss": F.cross_entropy, "optimizer": adamw, "transport": "threads"}
    batches = [make_batch(24, seed=k) for k in range(4)]
    with pk.Pipeline(model, plan, **options) as pipeline:
        with pytest.raises(pk.errors.StageError, match="broken"):
            list(pipeline.steps(batches))
        # Some of its updates may have been made.
        with suppress(pk.errors.RunError):
            assert len(list(pipeline.steps(batches))) == len(batches)


def test_what_needs_one_minibatch_at_once_is_refused():
    model = make_mlp()
    plan = stale_plan(model, (2,), 1)
    with pytest.raises(InputError, match="with stale updates they come in several"):
        trained(plan, model, [], clip_norm=1.0)
    with pytest.raises(InputError, match=r"take the reducer 'parameter-server'.*or stale=0"):
        replicated(model, (2,)).with_reducer("owners", stale=1)
    with (
        pk.Pipeline(model, plan, loss=F.cross_entropy, optimizer=adamw) as pipeline,
        pytest.raises(InputError, match="leave update=False out, or take stale=0"),
    ):
        pipeline.step(*make_batch(24), update=False)
