"""Emulated devices: real processes and messages perform a schedule, only compute is a wait."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Costs, Plan, Schedule, schedules, simulate, versions
from penstock.base.errors import InputError, RunError, ScheduleError
from penstock.core.schedule import Kind
from penstock.core.schedule.lower import (
    add_communication,
    add_recompute,
    add_update,
    add_updates,
    lower,
)
from penstock.core.schedule.op import COMMUNICATION
from penstock.core.schedule.rounds import Rounds
from penstock.core.timing.spans import BUSY
from penstock.planning.plans import StagePlan
from penstock.training.rehearsal import rehearse
from penstock.training.rehearsal.conduct import default_costs, flattened, performable
from penstock.training.rehearsal.conductor import RehearsalJob, perform
from penstock.training.rehearsal.result import Steady, rehearsal_of
from tests.kit.examples import more
from tests.kit.helpers import amounts
from tests.kit.waiting import until

TWO_MS = Costs(0.002, 0.002, 0.002, update=0.001)


def build(name, num_ranks=2, num_microbatches=4, **options):
    return schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)


def performed(timeline):
    """The ops of each rank in the order in which they ran."""
    return [row.ops for row in timeline.rows]


def descendants(process):
    """Every process below one, from what Linux tells."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if fields[0] != "Z":
            parents[int(folder.name)] = int(fields[1])
    found, fresh = set(), {process}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def parent_of(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def nothing_left_behind():
    """No process, and no file in shared memory."""
    files, processes = set(os.listdir("/dev/shm")), descendants(os.getpid())
    yield
    assert until(lambda: descendants(os.getpid()) <= processes)
    assert set(os.listdir("/dev/shm")) <= files


@pytest.mark.parametrize(
    ("name", "num_ranks", "transport"),
    [
        ("zb-h1", 4, "shared-memory"),
        more("gpipe", 3, "shared-memory"),
        more("chimera", 2, "shared-memory"),
        ("gpipe", 3, "threads"),
        ("1f1b", 1, "threads"),
        ("breadth-first", 2, "threads"),
        ("zb-h1", 3, "threads"),
        ("zb-v", 2, "threads"),
        ("chimera", 4, "threads"),
        ("seq1f1b", 2, "threads"),
    ],
)
def test_ranks_perform_the_ops_of_the_simulator_in_its_order_and_take_as_long(
    name, num_ranks, transport, nothing_left_behind
):
    schedule = build(name, num_ranks, 4)
    found = rehearse(schedule, TWO_MS, steps=2, transport=transport)
    assert performed(found.measured) == performed(found.predicted)
    assert found.measured.source == "measured"
    assert found.measured.name == name
    least = simulate(schedule, TWO_MS).makespan
    # Nothing can be faster than planned; how much slower, a busy machine decides.
    assert 0.98 * least <= found.measured.makespan <= 30 * least
    assert found.measured.makespan in found.step_seconds
    assert len(found.step_seconds) == 1


def test_every_op_takes_its_own_time():
    costs = Costs([0.001, 0.004], [0.003, 0.001], 0.002, update=0.005)
    found = rehearse(build("zb-h1"), costs, steps=1, transport="threads")
    for span in found.measured.spans:
        if span.op.kind in BUSY:
            assert span.end - span.start >= costs.duration(span.op)


def test_a_slice_takes_its_share_of_a_microbatch():
    schedule = build("seq1f1b", num_slices=2)
    costs = Costs(0.004, 0.004, 0.004, update=0.004)
    found = rehearse(schedule, costs, steps=3, transport="threads")
    shortest = {}
    for span in found.measured.spans:
        length = span.end - span.start
        shortest[span.op.kind] = min(shortest.get(span.op.kind, length), length)
    assert 0.002 <= shortest[Kind.FORWARD] < 0.004 <= shortest[Kind.BACKWARD] < 0.008
    assert shortest[Kind.UPDATE] >= 0.004


@pytest.mark.parametrize("transport", ["threads", more("shared-memory")])
def test_a_planned_hop_is_kept_though_this_machine_is_faster(transport, nothing_left_behind):
    costs = Costs(0.001, 0.001, 0.001, hop=[0.01, 0.03])
    schedule = build("1f1b", 3, 2)
    found = rehearse(schedule, costs, steps=2, transport=transport)
    ends = {span.op: span.end for span in found.measured.spans}
    received = [span for span in found.measured.spans if span.op.kind in COMMUNICATION]
    hops = [
        (op, end - ends[found.measured.schedule.dependencies(send)[0]])
        for op, _, _, end, _ in received
        if op.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)
        for send in found.measured.schedule.dependencies(op)
    ]
    assert len(hops) == 8
    for op, seconds in hops:
        border = op.stage - 1 if op.kind is Kind.RECV_FORWARD else op.stage
        assert seconds >= costs.hop[border]
    assert found.predicted.makespan >= simulate(schedule, costs).makespan


def test_a_planned_reduction_is_kept():
    schedule = build("chimera", 2, 2)
    costs = Costs(0.001, 0.001, 0.001, reduce=0.05)
    found = rehearse(schedule, costs, steps=1, transport="threads")
    handed_in = {}
    for span in found.measured.spans:
        if span.op.kind is Kind.REDUCE:
            handed_in.setdefault(span.op.stage, {})[span.rank] = span.end
    updates = [span for span in found.measured.spans if span.op.kind is Kind.UPDATE]
    assert len(updates) == 4
    for span in updates:
        other = handed_in[span.op.stage][1 - span.rank]
        assert span.end >= other + 0.049  # the end is read a little after the message is sent


def test_recomputation_is_performed_too():
    schedule = add_recompute(build("1f1b"), [1])
    found = rehearse(schedule, TWO_MS, steps=1, transport="threads")
    kinds = [op.kind for op in found.measured.rows[1].ops]
    assert kinds.count(Kind.RECOMPUTE) == 4
    assert performed(found.measured) == performed(found.predicted)


def test_a_lowered_schedule_is_lowered_anew():
    schedule = build("1f1b")
    found = rehearse(lower(schedule), TWO_MS, steps=1, transport="threads")
    assert performed(found.measured) == list(add_communication(add_update(schedule)).ranks)


def test_a_plan_has_its_own_costs_and_may_be_played_faster():
    stages = tuple(
        StagePlan(
            layers=(str(rank),),
            rank=rank,
            forward_seconds=1.0,
            backward_input_seconds=1.0,
            backward_weight_seconds=2.0,
        )
        for rank in range(2)
    )
    plan = Plan(model="", schedule="1f1b", num_microbatches=3, stages=stages)
    found = rehearse(plan, steps=1, scale=0.02, transport="threads")
    # Its hops are measured here, and take milliseconds on a loaded machine.
    assert found.predicted.makespan == pytest.approx(plan.simulate().makespan * 0.02, rel=0.3)
    assert found.measured.makespan < plan.simulate().makespan


def test_without_costs_an_op_of_a_rank_takes_ten_milliseconds():
    costs = default_costs(build("zb-v"))
    assert costs.forward == costs.backward_input == costs.backward_weight == 0.005
    assert costs.hop == 0


def test_progress_tells_of_every_step():
    told = []
    rehearse(
        build("1f1b"), TWO_MS, steps=3, transport="threads", progress=lambda *at: told.append(at)
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_logical_waits_end_when_the_prediction_says():
    schedule = build("zb-h1", 3, 4)
    costs = Costs(0.02, 0.02, 0.02)
    found = rehearse(schedule, costs, steps=1, transport="threads", waits="logical")
    ends = {span.op: span.end for span in simulate(lower(schedule), costs).spans}
    start = {span.op: span.start for span in found.measured.spans}
    for span in found.measured.spans:
        if span.op.kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            assert span.end >= ends[span.op] - 0.005
            assert start[span.op] < span.end


@given(
    st.sampled_from([("1f1b", {}), ("chimera", {}), ("seq1f1b", {"num_slices": 3})]),
    st.integers(1, 3),
)
def test_flattening_keeps_the_times_of_the_simulator(family, half):
    name, options = family
    schedule = lower(build(name, 2, 2 * half, **options))
    costs = Costs(1.0, [2.0, 3.0], 1.5, hop=0.25, update=0.5)
    flat = simulate(flattened(schedule), costs.of_slices(schedule.num_slices))
    for row, other in zip(flat.rows, simulate(schedule, costs).rows, strict=True):
        assert list(row.ends) == pytest.approx(list(other.ends))


@given(st.floats(0.01, 100), st.booleans())
def test_scaled_costs_scale_the_timeline(factor, per_stage):
    forward = [1.0, 2.0] if per_stage else 1.5
    costs = Costs(forward, 1.0, 2.0, hop=0.5, update=1.0, recompute=3.0, reduce=0.5)
    schedule = lower(add_recompute(build("1f1b")))
    assert simulate(schedule, costs.scaled(factor)).makespan == pytest.approx(
        factor * simulate(schedule, costs).makespan
    )


def test_a_job_travels_as_text():
    costs = Costs(0.1, [0.1, 0.2], 0.3)
    job = RehearsalJob(
        ops=str(build("zb-h1")), costs=costs, num_steps=2, message_bytes=7, waits="logical",
        versions=versions.PipeMare(t2=0.5), deadline_seconds=3.0,
    )  # fmt: skip
    assert RehearsalJob.from_json(job.to_json()) == job
    assert job.schedule() == build("zb-h1")


def played(schedule, costs, late_seconds):
    """Times as if every message came so late."""
    timeline = simulate(schedule, replace(costs, hop=late_seconds))
    return [
        [time for span in spans for time in (span.start, span.end)] for spans in timeline.by_rank
    ]


def test_the_measured_hop_is_what_waiting_ranks_waited():
    schedule, costs = lower(build("1f1b", 3)), Costs()
    found = rehearsal_of(schedule, costs, [played(schedule, costs, 0.125)])
    assert found.hop_seconds == pytest.approx(0.125)
    assert found.predicted.makespan == pytest.approx(found.measured.makespan)
    assert [one.difference for one in found.comparisons] == pytest.approx([0, 0, 0])


def test_messages_that_lie_waiting_for_their_rank_do_not_count_as_slow():
    schedule, costs = lower(build("gpipe", 2, 8)), Costs([1.0, 5.0], [5.0, 1.0])
    assert rehearsal_of(schedule, costs, [played(schedule, costs, 0.25)]).hop_seconds == 0.25


def test_the_first_step_is_warm_up_and_the_median_step_is_shown():
    schedule, costs = lower(build("1f1b")), Costs()
    steps = [played(schedule, costs, late) for late in (9.0, 0.5, 0.25, 0.75)]
    found = rehearsal_of(schedule, costs, steps)
    lengths = [simulate(schedule, Costs(hop=late)).makespan for late in (0.5, 0.25, 0.75)]
    assert found.step_seconds == pytest.approx(lengths)
    assert found.measured.makespan == pytest.approx(lengths[0])


def test_ops_that_the_machine_held_up_are_counted():
    schedule, costs = lower(build("1f1b")), Costs()
    times = played(schedule, costs, 0.0)
    assert rehearsal_of(schedule, costs, [times]).num_held_up == 0
    last = max(at for at, op in enumerate(schedule.ranks[0]) if op.kind is Kind.BACKWARD)
    times[0][2 * last + 1] += 0.01
    assert rehearsal_of(schedule, costs, [times]).num_held_up == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"scale": 0}, "scale is 0"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"message_bytes": 0}, "message_bytes is 0"),
        ({"transport": "pigeons"}, "transport is 'pigeons'; use shared-memory or threads"),
        ({"waits": "none"}, "waits is 'none'"),
        ({"costs": Costs([1.0, 1.0, 1.0])}, "has 3 numbers"),
        ({"costs": 3}, "costs is of type int"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(InputError, match=words):
        rehearse(build("1f1b"), **changes)


def test_a_bad_schedule_or_too_many_ranks_are_refused_before_anything_starts():
    with pytest.raises(InputError, match=r"the plan is '1f1b', the name of a schedule"):
        rehearse("1f1b")
    with pytest.raises(ScheduleError, match="missing"):
        rehearse(Schedule.parse("0F0\n1F0,1B0\n"))
    with pytest.raises(InputError, match="has 200 ranks"):
        rehearse(build("1f1b", 200))


@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("a rank", r"rank 0's process was ended by SIGKILL.* in step 2 of 3"),
        more("the launcher", r"ended with exit code -9"),
    ],
)
def test_a_process_that_dies_ends_everything_with_one_clear_error(
    victim, words, nothing_left_behind
):
    before = descendants(os.getpid())

    def kill_one(done, total):
        ours = descendants(os.getpid()) - before
        ranks = [child for child in ours if parent_of(child) in ours]  # the launcher's children
        assert len(ranks) == 3
        (launcher,) = ours - set(ranks)
        os.kill(min(ranks) if victim == "a rank" else launcher, signal.SIGKILL)
        killed.append(time.monotonic())

    killed = []
    with pytest.raises(RunError, match=words):
        costs = Costs(0.05, 0.05, 0.05, update=2.0)
        rehearse(build("1f1b", 3), costs, steps=3, progress=kill_one)
    assert time.monotonic() - killed[0] < 200


def test_a_rank_that_fails_says_why(nothing_left_behind):
    """More memory than there is."""
    with pytest.raises(RunError, match=r"rank [01]: .*allocate"):
        rehearse(build("1f1b"), TWO_MS, message_bytes=1 << 50)


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
from penstock import Costs, schedules
from penstock.training.rehearsal import rehearse
schedule = schedules.build("1f1b", num_ranks=2, num_microbatches=2)
rehearse(schedule, Costs(100.0, 100.0, 100.0))
"""


@pytest.mark.parametrize("how", [more(signal.SIGINT), signal.SIGKILL])
def test_whoever_ends_the_asking_process_ends_the_ranks(how, nothing_left_behind):
    asking = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stderr=subprocess.PIPE)
    assert until(lambda: len(descendants(asking.pid)) == 3)
    ranks = descendants(asking.pid)
    time.sleep(1)
    asking.send_signal(how)
    asking.communicate()
    assert until(lambda: not [rank for rank in ranks if Path(f"/proc/{rank}").exists()])


def test_steps_on_trust_overlap():
    schedule = build("zb-h2", 2, 4)
    job = RehearsalJob(
        ops=str(performable(schedule, "post-validated")),
        costs=Costs(0.004, 0.004, 0.004),
        num_steps=6,
        message_bytes=64,
        waits="relative",
        updates="post-validated",
        deadline_seconds=300,
    )
    steps = list(perform(job, "shared-memory"))
    # Rank 0 has begun the next step when rank 1 is still in this one.
    pairs = itertools.pairwise(steps)
    assert any(following[0][0] < current[1][-1] for current, following in pairs)


def test_ranks_agree_before_updates_or_read_the_verdict_before_the_next_backward():
    schedule = build("zb-v", 2, 4)
    agreed = rehearse(schedule, TWO_MS, steps=2, updates="agreed")
    # That processes trust each other is seen above.
    trusting = rehearse(schedule, TWO_MS, steps=2, updates="post-validated", transport="threads")
    for row in agreed.measured.rows:
        kinds = [op.kind for op in row.ops]
        assert kinds[-3:] == [Kind.AGREE, Kind.UPDATE, Kind.UPDATE]
    for row in trusting.measured.rows:
        kinds = [op.kind for op in row.ops]
        assert kinds.count(Kind.AGREE) == 1
        assert kinds.index(Kind.AGREE) < kinds.index(Kind.BACKWARD_INPUT)
    assert trusting.pace_seconds > 0


def streamed(schedule, replicas, minibatch=None):
    """What the ranks of a stream perform."""
    rounds = Rounds(replicas)
    if minibatch is not None:
        rounds = Rounds.of_minibatches(replicas, minibatch, schedule.num_microbatches)
    return add_communication(add_updates(schedule, rounds))


@pytest.mark.parametrize(
    ("name", "num_ranks", "options", "replicas", "minibatch", "transport"),
    [
        ("pipedream", 3, {}, (1, 1, 1), None, "threads"),
        more("pipedream", 4, {"replicas": "3-1"}, (3, 1), None, "shared-memory"),
        ("pipedream", 3, {"replicas": "1-2"}, (1, 2), None, "threads"),
        ("pipedream-2bw", 3, {}, (1, 1, 1), 4, "threads"),
        ("pipedream-2bw", 3, {"replicas": "2-1"}, (2, 1), 3, "threads"),
    ],
)
def test_a_stream_is_performed_with_every_update_at_its_place(
    name, num_ranks, options, replicas, minibatch, transport, nothing_left_behind
):
    schedule = build(name, num_ranks, 11, **options)  # the last round lacks microbatches
    costs = Costs(0.001, 0.001, 0.001, update=0.001, reduce=0.002)
    found = rehearse(schedule, costs, steps=2, transport=transport, minibatch=minibatch)
    expected = streamed(schedule, replicas, minibatch)
    assert performed(found.measured) == performed(found.predicted) == list(expected.ranks)
    updates = [span for span in found.measured.spans if span.op.kind is Kind.UPDATE]
    assert len(updates) > schedule.num_ranks
    assert min(span.end - span.start for span in updates) >= 0.001 - 1e-9
    starts = {span.op: span.start for span in found.measured.spans}
    for op, rank, _, end, _ in updates:
        for handed_in in found.measured.schedule.dependencies(op):
            if found.measured.schedule.where[handed_in] != rank:  # in every round anew
                assert end >= starts[handed_in] + 0.003


def test_updates_of_a_stream_wait_logically_each_until_its_own_time():
    schedule = build("pipedream", 2, 5)
    costs = Costs(0.02, 0.02, 0.02, update=0.02)
    found = rehearse(schedule, costs, steps=2, transport="threads", waits="logical")
    ends = {span.op: span.end for span in simulate(streamed(schedule, (1, 1)), costs).spans}
    for span in found.measured.spans:
        if span.op.kind in BUSY:
            # What is drawn begins with the first op, which may have come that much too late.
            assert span.end >= ends[span.op] - 0.015


def test_a_plan_that_never_flushes_is_a_stream_with_its_policy_and_minibatches():
    stage = dict.fromkeys(
        ("forward_seconds", "backward_input_seconds", "backward_weight_seconds"), 1.0
    )
    stages = tuple(StagePlan(layers=(str(rank),), rank=rank, **stage) for rank in range(2))
    policy = versions.Latest(updates="minibatch")
    plan = Plan(model="", schedule="pipedream", versions=policy, num_microbatches=3, stages=stages)
    found = rehearse(plan, steps=1, scale=0.001, transport="threads")
    expected = streamed(build("pipedream", 2, 18), (1, 1), 3)
    assert performed(found.measured) == list(expected.ranks)
    assert found.steady_seconds.predicted == pytest.approx(0.003, rel=0.5)
    with pytest.raises(InputError, match="minibatch is 4, but the plan has its own"):
        rehearse(plan, minibatch=4)


@given(st.integers(1, 4), st.integers(2, 5), st.floats(0.1, 9), amounts(9), amounts(2))
def test_in_the_steady_state_a_microbatch_takes_one_ranks_work(
    num_ranks, minibatch, forward, backward, update
):
    costs = Costs(forward, backward, backward, update=update)
    size = max(minibatch, num_ranks - 1)
    schedule = streamed(build("pipedream", num_ranks, 8 * size), (1,) * num_ranks, size)
    found = rehearsal_of(schedule, costs, [played(schedule, costs, 0.0)], period=size)
    work = forward + 2 * backward
    assert found.steady_seconds.predicted == pytest.approx(work + update / size)
    assert found.steady_efficiency.predicted == pytest.approx(work / (work + update / size))


def test_the_steady_state_is_measured_over_all_steps_but_the_first():
    schedule, costs = streamed(build("pipedream", 3, 24), (1, 1, 1)), Costs()
    steps = [played(schedule, costs, late) for late in (9.0, 0.75, 0.25, 0.5)]
    found = rehearsal_of(schedule, costs, steps, period=1)
    # A stage may be p−s microbatches ahead, so of a round trip's hops each hides a share.
    assert found.steady_seconds.measured == pytest.approx(3 + 0.5 * 4 / 3)
    assert found.steady_efficiency.measured == pytest.approx(3 / (3 + 0.5 * 4 / 3))
    assert found.steady_seconds.difference == pytest.approx(0)
    assert [one.name for one in found.comparisons[3:]] == ["steady seconds", "steady efficiency"]
    assert [one.is_share for one in found.comparisons] == [False, True, True, False, True]


def test_the_steady_state_is_the_middle_half_of_a_stream_in_whole_updates():
    schedule = build("pipedream", 3, 24)
    assert Steady.of(schedule, Costs(), 1)[:2] == (6, 18)
    assert Steady.of(schedule, Costs(), 5)[:2] == (6, 16)
    assert Steady.of(schedule, Costs(), 13) is None


def test_a_short_stream_has_no_steady_state_and_a_flushed_schedule_has_none():
    for name, count, period in (("pipedream", 1, 1), ("1f1b", 24, None), ("pipedream", 5, 4)):
        schedule, costs = streamed(build(name, 2, count), (1, 1)), Costs()
        found = rehearsal_of(schedule, costs, [played(schedule, costs, 0.0)], period=period)
        assert found.steady_seconds is None
        assert found.steady_efficiency is None
        assert len(found.comparisons) == 3


def test_waiting_for_the_gradients_of_another_replica_is_no_work():
    schedule = streamed(build("pipedream", 3, 8, replicas="2-1"), (2, 1))
    costs = Costs(reduce=0.5)
    times = played(schedule, costs, 0.0)
    for ops, own in zip(schedule.ranks, times, strict=True):
        for at, op in enumerate(ops):
            if op.kind is Kind.UPDATE:  # as a worker has it: at once, and then it waits
                own[2 * at] = own[2 * at - 1]
    found = rehearsal_of(schedule, costs, [times])
    assert found.measured.bubble == pytest.approx(found.predicted.bubble)
    assert found.num_held_up == 0


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("pipedream", {"updates": "agreed"}, "never flushes, so there is no moment"),
        ("pipedream", {"minibatch": 2}, "pipedream does not update once per so many"),
        ("1f1b", {"minibatch": 2}, "minibatch is 2, but 1f1b does not"),
        ("pipedream-2bw", {"minibatch": 2.5}, "minibatch is 2.5, but must be a whole number"),
        ("pipedream-2bw", {"minibatch": 2}, "needs minibatches of 3"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(name, changes, words):
    with pytest.raises(InputError, match=words):
        rehearse(build(name, 4, 8), **changes)
