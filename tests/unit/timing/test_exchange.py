"""Sums of gradients part by part, beside an event loop, and what they do to steps."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock.base.errors import InputError
from penstock.core.schedule.lower import add_update
from penstock.core.schedule.op import Kind
from penstock.core.timing.costs import Exchange
from penstock.core.timing.timeline import Timeline

SECONDS = st.integers(0, 9).map(float)
PASSED = st.lists(SECONDS, min_size=1, max_size=4)


def by_event_loop(made, seconds, free):
    """What a workshop does that knows nothing but queues: (part, thing) -> (start, end)."""
    queues, turn = [set() for _ in seconds], [0] * len(seconds)
    busy, spans = [True] * len(seconds), {}
    events = [(there, "comes", part, 0) for part, there in enumerate(made)]
    events += [(until, "is free", -1, place) for place, until in enumerate(free)]
    heapq.heapify(events)
    while events:
        now, what, part, place = heapq.heappop(events)
        if what == "comes":
            queues[place].add(part)
        else:
            busy[place] = False
        for here, waiting in enumerate(queues):
            if not busy[here] and turn[here] in waiting:
                part, end, busy[here] = turn[here], now + seconds[here], True
                turn[here] += 1
                spans[part, here] = now, end
                heapq.heappush(events, (end, "is free", part, here))
                if here + 1 < len(seconds):
                    heapq.heappush(events, (end, "comes", part, here + 1))
    return spans


def copies(replicas, microbatches=4):
    return add_update(
        pk.schedules.build(
            "1f1b", num_ranks=sum(replicas), num_microbatches=microbatches, replicas=replicas
        )
    )


@given(
    replicas=st.sampled_from([(2,), (3,), (2, 1), (2, 2), (1, 3)]),
    parts=st.integers(1, 5),
    seconds=PASSED,
    once=SECONDS,
    data=st.data(),
)
def test_updates_wait_for_the_last_part_of_their_stage(replicas, parts, seconds, once, data):
    stages = len(replicas)
    lengths = st.lists(st.integers(1, 9).map(float), min_size=stages, max_size=stages)
    costs = pk.Costs(
        forward=data.draw(lengths), backward_input=data.draw(lengths), hop=1.0, update=1.0,
        exchanges=[Exchange(parts, tuple(seconds), once)] * stages,
    )  # fmt: skip
    timeline = pk.simulate(copies(replicas), costs)
    for stage, count in enumerate(replicas):
        own = [span for span in timeline.spans if span.op.stage == stage]
        handed = [span for span in own if span.op.kind is Kind.REDUCE]
        updates = [span for span in own if span.op.kind is Kind.UPDATE]
        if count == 1:
            assert not [one for one in timeline.transfers if one.stage == stage]
            continue
        last = [
            next(one for one in own if one.op == span.op._replace(kind=Kind.BACKWARD))
            for span in handed
        ]
        made = [
            max(one.start + (one.end - one.start) * (part + 1) / parts for one in last)
            for part in range(parts)
        ]
        spans = by_event_loop(made, seconds, [0.0] * len(seconds))
        there = max(end for _, end in spans.values()) + once
        assert [span.start for span in updates] == pytest.approx([there] * count)
        moved = [one for one in timeline.transfers if one.stage == stage]
        assert [one.number for one in moved] == [*range(parts)]
        assert {one.ranks for one in moved} == {tuple(sorted({span.rank for span in handed}))}
    assert Timeline.from_json(timeline.to_json()) == timeline


@given(parts=st.integers(1, 6), seconds=st.integers(0, 30).map(float))
def test_early_parts_hide_what_they_can_and_never_more(parts, seconds):
    schedule = copies((2,))
    costs = pk.Costs(reduce=seconds)
    late = pk.simulate(schedule, costs).makespan
    each = Exchange(parts, (seconds / parts,))
    early = pk.simulate(schedule, replace(costs, exchanges=[each])).makespan
    alone = pk.simulate(schedule, pk.Costs()).makespan
    # At best only the last part is left when the backward, of 2, ends.
    least = alone + max(seconds / parts, seconds - 2.0 * (parts - 1) / parts)
    assert early == pytest.approx(least)
    assert early <= late + 1e-9


def test_stages_of_the_same_ranks_take_turns_on_their_links():
    schedule = add_update(pk.schedules.build("chimera", num_ranks=2, num_microbatches=4))
    costs = pk.Costs(exchanges=[Exchange(3, (2.0,)), Exchange(2, (1.0, 0.5), 0.25)])
    timeline = pk.simulate(schedule, costs)
    moved = sorted(timeline.transfers, key=lambda one: one.start)
    assert {one.stage for one in moved} == {0, 1}
    for before, after in pairwise(moved):
        assert before.end <= after.start


def test_costs_say_what_an_exchange_must_be():
    for wrong in ([Exchange(0, (1.0,))], [Exchange(2, ())], [Exchange(1, (-1.0,))], [3], "much"):
        with pytest.raises(InputError, match="exchanges"):
            pk.Costs(exchanges=wrong)
    with pytest.raises(InputError, match="2 stages"):
        pk.simulate(copies((2, 1)), pk.Costs(exchanges=[None]))
    doubled = pk.Costs(exchanges=[Exchange(2, (1.0, 3.0), 0.5), None]).scaled(2.0)
    assert doubled.exchanges == (Exchange(2, (2.0, 6.0), 1.0), None)
