"""Laws of schedules that never flush, for any replicas and any lengths."""

from __future__ import annotations

from itertools import accumulate
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Costs, Kind, check, schedules, simulate, versions
from penstock.base.errors import InputError
from penstock.core.schedule.lower import add_communication, add_free, add_updates
from penstock.core.schedule.rounds import Rounds, Windows, warm_up

replicas = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
lengths = st.integers(1, 24)


def stream(counts, length, family="pipedream"):
    return schedules.build(family, num_ranks=sum(counts), num_microbatches=length, replicas=counts)


@given(replicas, lengths, st.integers(1, 6) | st.none())
def test_any_stream_with_its_updates_and_messages_can_run(counts, extra, minibatch):
    length = max(counts) + extra
    rounds = Rounds(counts)
    if minibatch is not None:
        rounds = Rounds.of_minibatches(counts, max(minibatch, *counts), length)
    lowered = add_communication(add_updates(add_free(stream(counts, length)), rounds))
    check(lowered)
    check(stream(counts, length), capacity=1)
    assert lowered.num_microbatches == length
    for stage, count in enumerate(counts):
        last = max(rounds.of(stage, k) for k in range(length))
        for rank in lowered.ranks_of(stage):
            updates = [op for op in lowered.ranks[rank] if op.kind is Kind.UPDATE]
            # Every replica takes part in every round, also in a last one without its microbatch.
            assert len(updates) == last + 1
        reduces = [op for op in lowered.where if op.kind is Kind.REDUCE and op.stage == stage]
        assert len(reduces) == (count * (last + 1) if count > 1 else 0)


@given(replicas, lengths)
def test_microbatch_k_is_on_replica_k_mod_r_and_noam_are_in_flight(counts, extra):
    schedule = stream(counts, sum(counts) * 2 + extra)
    for stage, count in enumerate(counts):
        ranks = schedule.ranks_of(stage)
        for op, rank in schedule.where.items():
            if op.stage == stage:
                assert rank == ranks[op.microbatch % count]
        assert warm_up(counts, stage) == (sum(counts) - 1 - sum(counts[:stage])) // count
    in_flight = simulate(schedule).peak_activations
    assert in_flight[0] == ceil(sum(counts) / counts[0])


@given(
    replicas,
    st.lists(st.integers(1, 7), min_size=1, max_size=12),
    st.booleans(),
    st.integers(0, 12),
)
@settings(max_examples=60)
def test_segments_end_to_end_are_the_schedule_of_the_stream(counts, sizes, by_minibatch, left):
    if by_minibatch:
        sizes = [max(size, *counts) for size in sizes]
    left = min(left, len(sizes))  # how many are fed before the loop is left, if not all
    total = sum(sizes[:left])
    if total < max(counts):
        return

    def lower(length, rounds):
        return add_communication(add_updates(stream(counts, length), rounds))

    windows = Windows(lower, counts, by_minibatch=by_minibatch)
    ends = tuple(accumulate(sizes[:left]))
    whole = lower(total, Rounds(counts, ends if by_minibatch else None))
    fed: list[list] = [[] for _ in whole.ranks]
    drains_with_last = left % 2
    for index in range(left + 1):
        known = sizes[: min(index + 1, left)]
        last = index == left - drains_with_last
        segment, start = windows.segment(known, num_before=index, last=last)
        assert segment.begins == (index == 0) and segment.ends == last
        for own, ops in zip(fed, segment.ranks, strict=True):
            own += [op._replace(microbatch=op.microbatch + sum(sizes[:start])) for op in ops]
        if last:
            break
    assert tuple(map(tuple, fed)) == whole.ranks


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10))
def test_versions_are_those_of_the_table(p, m, extra):
    length = 3 * p + extra
    per_microbatch = add_updates(stream((1,) * p, length), Rounds((1,) * p))
    for s in range(p):
        place = versions.Place(s, p, p - 1 - s)
        table = {
            versions.Latest(): (lambda k, s=s: max(0, k - (p - 1 - s)), lambda k: k),
            versions.Stash(): (lambda k, s=s: max(0, k - (p - 1 - s)), None),
            versions.VerticalSync(): (lambda k: max(0, k - (p - 1)), None),
        }
        for policy, (forward, backward) in table.items():
            ops = per_microbatch.ranks[s]
            found = versions.trace(ops, policy, Rounds((1,) * p), p)
            assert found.held[s] == policy.versions_held(place)
            for op, version in zip(ops, found.versions, strict=True):
                if op.kind is Kind.FORWARD or (op.kind is Kind.BACKWARD and backward is None):
                    assert version == forward(op.microbatch)
                elif op.kind is Kind.BACKWARD:
                    assert version == backward(op.microbatch)
    size = max(m, p - 1, 1)
    rounds = Rounds.of_minibatches((1,) * p, size, length)
    by_minibatch = add_updates(stream((1,) * p, length), rounds)
    for s in range(p):
        found = versions.trace(by_minibatch.ranks[s], versions.DoubleBuffer(), rounds, p)
        assert found.held[s] <= 2
        for op, version in zip(by_minibatch.ranks[s], found.versions, strict=True):
            if op.kind in (Kind.FORWARD, Kind.BACKWARD):
                assert version == max(0, op.microbatch // size - 1)


@pytest.mark.parametrize(
    ("counts", "costs"),
    [
        ((15, 1), Costs(forward=[15, 1], backward_input=[15, 1], backward_weight=[15, 1])),
        ((2, 1, 1), Costs(forward=[2, 1, 1], backward_input=[2, 1, 1], backward_weight=[2, 1, 1])),
        ((1, 1, 1, 1), Costs()),
    ],
)
def test_balanced_stages_have_no_bubble_in_the_steady_state(counts, costs):
    few, many = 4 * sum(counts), 12 * sum(counts)
    short, long = (simulate(stream(counts, length), costs).makespan for length in (few, many))
    per_microbatch = (long - short) / (many - few)
    one_device = sum(costs.forward) * 3 if isinstance(costs.forward, tuple) else 3 * len(counts)
    assert per_microbatch == pytest.approx(one_device / sum(counts), rel=0.01)


def test_a_flush_costs_what_the_stream_saves():
    schedule = schedules.build("1f1b", num_ranks=4, num_microbatches=4)
    flushed = simulate(schedule).makespan / 4
    short, long = (simulate(stream((1,) * 4, length)).makespan for length in (20, 40))
    assert (long - short) / 20 / flushed == pytest.approx(4 / 7)  # m/(m+p−1)


@pytest.mark.parametrize(
    ("given_replicas", "message"),
    [
        ("2-x", "give a count ≥ 1 for every stage"),
        ("0-4", "give a count ≥ 1 for every stage"),
        ("2-1", "replicas 2-1 are 3 ranks, but num_ranks is 4"),
    ],
)
@pytest.mark.parametrize("family", ["pipedream", "pipedream-2bw", "1f1b", "gpipe"])
def test_replicas_that_make_no_sense_are_refused(family, given_replicas, message):
    with pytest.raises(InputError, match=f"{family}: .*{message}"):
        schedules.build(family, num_ranks=4, num_microbatches=8, replicas=given_replicas)


def test_fewer_microbatches_than_replicas_are_refused():
    with pytest.raises(InputError, match="a stage has 3 replicas, but there are only 2"):
        stream((3, 1), 2)


def test_a_minibatch_too_short_for_two_versions_is_refused():
    with pytest.raises(InputError, match=r"a minibatch of 2 microbatches is too short.*take 3"):
        schedules.build("pipedream-2bw", num_ranks=4, num_microbatches=8, minibatch=2)
