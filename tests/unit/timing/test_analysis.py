"""Timelines by hand, small enough to think through."""

from __future__ import annotations

import pytest

from penstock import Costs, Op, Span, Timeline, schedules, simulate
from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule.lower import add_update
from penstock.core.timing import Idle, find_parting, idle_of, measured_costs

WITH_MESSAGES = (
    ("0F0", 0, 0, 2),
    ("0SEND_F0", 0, 2, 3),
    ("0RECV_B0", 0, 3, 10),
    ("0B0", 0, 10, 14),
    ("1RECV_F0", 1, 0, 4),
    ("1F0", 1, 4, 6),
    ("1B0", 1, 6, 8),
    ("1SEND_B0", 1, 8, 9),
)
"""Each message takes 2: from the end of the op that makes it until it is received."""


def timeline(*rows, source="measured"):
    """Rows of (op, rank, start, end)."""
    spans = [Span(Op.parse(op), *rest) for op, *rest in rows]
    return Timeline.of(spans, 1 + max(span.rank for span in spans), "by hand", source)


def moved(by, *rows, at=0.0):
    return tuple((op, rank, a + by * (a >= at), b + by * (b > at)) for op, rank, a, b in rows)


def test_messages_that_the_step_waits_for_are_communication():
    # Without them it would take 10: F, F, B and B of 2, 2, 2 and 4.
    assert idle_of(timeline(*WITH_MESSAGES)) == (Idle(4, 0, 4), Idle(6, 0, 4))


def test_a_rank_that_begins_late_lets_the_other_wait():
    late = [(op, rank, a + 5 * (op != "0F0"), b + 5) for op, rank, a, b in WITH_MESSAGES[:4]]
    late = [("0F0", 0, 5, 7), *late[1:]]
    others = [("1RECV_F0", 1, 0, 9), *moved(5, *WITH_MESSAGES[5:])]
    assert idle_of(timeline(*late, *others)) == (Idle(4, 5, 4), Idle(6, 5, 4))


def test_an_op_much_slower_than_its_kind_lets_the_other_rank_wait():
    rows = [("0F0", 0, 0, 1), ("0F1", 0, 1, 2), ("0F2", 0, 2, 9)]
    rows += [("1F0", 1, 1, 2), ("1F1", 1, 2, 3), ("1F2", 1, 9, 10)]
    slow_itself, peer = idle_of(timeline(*rows))
    assert peer == Idle(1, 6, 0)
    assert slow_itself == Idle(1, 0, 0)


def test_stages_of_different_lengths_are_no_waiting_but_bubble():
    uneven = schedules.build("1f1b", num_ranks=2, num_microbatches=6)
    for idle in idle_of(simulate(uneven, Costs(forward=[1, 3]))):
        assert (idle.waiting, idle.communication) == (0, 0)


def test_a_message_behind_other_work_costs_nothing():
    rows = [("0F0", 0, 0, 2), ("0F1", 0, 2, 4), ("1F0", 1, 3, 4), ("1F1", 1, 5, 6)]
    # The last forward alone follows its message; the first one's was hidden.
    assert idle_of(timeline(*rows)) == (Idle(1, 0, 1), Idle(3, 0, 1))


def test_a_rank_without_ops_is_idle_all_the_time():
    spans = [Span(Op.parse("0F0"), 0, 0, 2)]
    assert idle_of(Timeline.of(spans, 2)) == (Idle(0, 0, 0), Idle(2, 0, 0))
    assert idle_of(Timeline.of([], 1)) == (Idle(0, 0, 0),)


def test_clocks_that_disagree_make_no_part_negative():
    rows = (*WITH_MESSAGES[:4], *moved(-3, *WITH_MESSAGES[4:]))
    shown = timeline(*rows)
    for idle, busy in zip(idle_of(shown), shown.busy, strict=True):
        assert min(idle) >= 0
        assert idle.total == shown.makespan - busy


def test_half_a_step_cannot_be_taken_apart():
    with pytest.raises(ScheduleError, match="rank 0: 1F0 needs 0F0, which is not in the schedule"):
        idle_of(timeline(("1F0", 0, 0, 1)))


def test_costs_are_medians_by_stage_and_a_hop_runs_to_the_end_of_the_receive():
    found = measured_costs(timeline(*WITH_MESSAGES))
    assert found == Costs([2, 2], [2, 1], [2, 1], [2, 0], [0, 0], None, [0, 0])
    one_slow = [("0F0", 0, 0, 1), ("0F1", 0, 1, 2), ("0F2", 0, 2, 9)]
    assert measured_costs(timeline(*one_slow)).forward == (1,)


def test_a_message_that_was_there_long_ago_says_little_about_the_hop():
    rows = [("0F0", 0, 0, 1), ("0F1", 0, 1, 2), ("1RECV_F0", 1, 0, 1.25), ("1F0", 1, 1.25, 8)]
    rows += [("1RECV_F1", 1, 8, 8.125), ("1F1", 1, 8.125, 9)]
    sends = [("0SEND_F0", 0, 1, 1), ("0SEND_F1", 0, 2, 2)]
    assert measured_costs(timeline(*rows, *sends)).hop == (0.25, 0)
    # Where that is all there is, the quickest is a bound.
    all_late = [("1RECV_F0", 1, 5, 5.25), ("1RECV_F1", 1, 5.25, 5.5)]
    assert measured_costs(timeline(*rows[:2], *sends, *all_late)).hop == (3.5, 0)


def test_sums_of_gradients_have_costs_of_their_own():
    schedule = add_update(schedules.build("chimera", num_ranks=2, num_microbatches=4))
    costs = Costs(hop=0.5, update=0.25, reduce=3)
    again = measured_costs(simulate(schedule, costs))
    assert (again.hop, again.reduce) == ((0.5, 0), (3, 3))


def predicted():
    return simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=4), Costs(hop=0.1))


def changed(shown, change):
    """The timeline with ``change(span) -> (start, end)`` applied to each."""
    spans = [Span(span.op, span.rank, *change(span)) for span in shown.spans]
    return Timeline(Timeline.of(spans, shown.num_ranks).rows, "", "measured")


def test_an_op_that_takes_longer_is_named_before_those_that_it_makes_late():
    slow = changed(predicted(), lambda s: (s.start, s.end + 1) if s.start == 0 else
                   (s.start + 1, s.end + 1))  # fmt: skip
    found = find_parting(predicted(), slow)
    assert (str(found.measured.op), found.cause.kind, str(found.cause.op)) == ("0F0", "op", "0F0")
    assert (found.start_excess, found.cause.excess) == (0, 1)


def test_small_differences_are_traced_to_the_largest_of_them():
    extra = {"0F0": 0.3, "0F1": 0.1}
    late = dict.fromkeys(map(str, (s.op for s in predicted().spans)), 0.4) | {"0F0": 0, "0F1": 0.3}
    late["1F0"] = 0.3
    slow = changed(predicted(), lambda s: (
        s.start + late[str(s.op)], s.end + late[str(s.op)] + extra.get(str(s.op), 0)
    ))  # fmt: skip
    found = find_parting(predicted(), slow, tolerance=0.35 / predicted().makespan)
    assert str(found.measured.op) == "1B0"
    assert (str(found.cause.op), found.cause.rank) == ("0F0", 0)
    assert found.start_excess == pytest.approx(0.4)


def test_a_rank_that_begins_late_is_the_cause():
    def change(span):
        return (span.start + 2, span.end + 2) if span.rank == 1 else (span.start, span.end)

    alone = Timeline.of([Span(Op.parse("0F0"), 0, 0, 1), Span(Op.parse("1F0"), 1, 1, 2)], 2)
    found = find_parting(alone, changed(alone, change))
    assert (found.cause.kind, str(found.cause.after), found.cause.after_rank) == ("pause", "0F0", 0)
    two = [Span(Op.parse("0F0"), 0, 0, 1), Span(Op.parse("0F1"), 1, 0, 1)]
    found = find_parting(Timeline.of(two, 2), changed(Timeline.of(two, 2), change))
    assert (found.cause.kind, found.cause.rank, found.cause.excess) == ("begin", 1, 2)


def test_what_is_early_is_traced_along_the_way_that_was_predicted():
    foretold = timeline(
        ("0F0", 0, 0, 2), ("0F1", 0, 2, 4), ("1F0", 1, 2, 3.5), ("1F1", 1, 4, 5.75),
        source="predicted",
    )  # fmt: skip
    shown = timeline(
        ("0F0", 0, 0, 1.75), ("0F1", 0, 1.75, 3.5), ("1F0", 1, 1.75, 3.5), ("1F1", 1, 3.5, 5.25)
    )
    found = find_parting(foretold, shown, tolerance=0.4 / 6)
    assert (str(found.measured.op), str(found.cause.op), found.cause.kind) == ("1F1", "0F0", "op")
    assert found.cause.excess == -0.25


@pytest.mark.parametrize(
    ("first", "second", "start", "what", "op", "after"),
    [
        ((1.0, 2.0), (2.0, 3.0), 6.0, "pause", "1F2", "0F2"),
        ((1.0, 2.25), (2.25, 3.5), 3.5, "op", "1F0", "None"),
    ],
)
def test_a_late_message_is_told_from_slow_ops_before(first, second, start, what, op, after):
    senders = [(f"0F{k}", 0, k / 2, k / 2 + 0.5) for k in range(3)]

    def receivers(*starts_and_ends):
        return [(f"1F{k}", 1, *both) for k, both in enumerate(starts_and_ends)]

    foretold = timeline(*senders, *receivers((1, 2), (2, 3), (3, 4)), source="predicted")
    shown = timeline(*senders, *receivers(first, second, (start, start + 1)))
    cause = find_parting(foretold, shown, tolerance=0.4 / 4).cause
    assert (cause.kind, str(cause.op), str(cause.after)) == (what, op, after)


def test_scatter_is_no_difference():
    shown = changed(predicted(), lambda s: (s.start, s.start + (s.end - s.start) * (
        0.9 if s.op.microbatch % 2 else 1.1)))  # fmt: skip
    assert find_parting(predicted(), shown, tolerance=0.0) is None


def test_other_schedules_are_not_compared():
    more = simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=5))
    with pytest.raises(InputError, match="0F4 of rank 0 is not in the measured timeline"):
        find_parting(more, predicted())
    with pytest.raises(InputError, match="0F4 of rank 0 is not in the predicted timeline"):
        find_parting(predicted(), more)
    swapped = Timeline.of([span._replace(rank=1 - span.rank) for span in predicted().spans], 2)
    with pytest.raises(InputError, match="of rank 0 is not in the measured timeline"):
        find_parting(predicted(), swapped)
