import json

import pytest

from penstock import Costs, Op, Span, Timeline, schedules, simulate
from penstock.errors import FileError


def timeline(*rows, source="measured"):
    """Rows of (op, rank, start, end)."""
    spans = [Span(Op.parse(op), *rest) for op, *rest in rows]
    return Timeline.of(spans, 1 + max(span.rank for span in spans), "by hand", source)


def test_it_starts_at_zero_and_is_in_order():
    shown = timeline(("0B0", 0, 13, 16), ("0F0", 0, 10, 12), ("1F0", 1, 12, 13))
    assert [(str(span.op), span.start) for span in shown.spans] == [
        ("0F0", 0), ("0B0", 3), ("1F0", 2),
    ]  # fmt: skip
    assert shown.makespan == 6
    assert shown.busy == (5, 1)
    assert shown.bubble == pytest.approx(0.5)


def test_waiting_for_a_message_is_not_work():
    shown = timeline(("0F0", 0, 0, 1), ("0RECV_B0", 0, 1, 4), ("0B0", 0, 4, 5))
    assert shown.busy == (2,)
    assert shown.bubble == pytest.approx(0.6)


def test_the_stage_bubble_looks_at_each_rank_from_its_first_op_to_its_last():
    shown = timeline(("0F0", 0, 0, 4), ("1F0", 1, 4, 8))
    assert shown.bubble == 0.5
    assert shown.stage_bubble == 0


def test_activations_are_held_from_forward_to_the_weight_gradient():
    shown = timeline(("0F0", 0, 0, 1), ("0F1", 0, 1, 2), ("0I0", 0, 2, 3), ("0W0", 0, 3, 4))
    assert shown.in_flight == (((0, 0), (0, 1), (1, 2), (4, 1)),)
    assert shown.peak_activations == (2,)


def test_a_stage_of_two_on_a_rank_is_half_of_its_layers():
    shown = timeline(("0F0", 0, 0, 1), ("1F0", 0, 1, 2), ("1B0", 0, 2, 3), ("0B0", 0, 3, 4))
    assert shown.in_flight[0] == ((0, 0), (0, 0.5), (1, 1), (3, 0.5), (4, 0))


def test_an_empty_timeline_has_all_its_metrics():
    empty = Timeline.of([], 2)
    assert (empty.makespan, empty.bubble, empty.stage_bubble) == (0, 0, 0)
    assert empty.peak_activations == (0, 0)


def test_json_round_trip_of_a_measured_one():
    shown = timeline(("0F0", 0, 0, 1), ("0UPDATE0", 0, 1, 1.5))
    assert Timeline.from_json(shown.to_json()) == shown
    assert json.loads(shown.to_json())["source"] == "measured"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "unknown field `colour`"),
        ({"source": "dreamt"}, r"\$.source"),
        ({"spans": [["0G0", 0, 0, 1]]}, "'0G0' is not an op"),
        ({"spans": [["0F0", 0, 0]]}, r"\$.spans\[0\]"),
        ({"spans": [["0F0", 5, 0, 1]]}, "0F0 is on rank 5, but num_ranks is 2"),
    ],
)
def test_what_is_not_a_timeline(change, message):
    good = simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=1), Costs())
    text = json.dumps({**json.loads(good.to_json()), **change})
    with pytest.raises(FileError, match=f"trace.json.*{message}"):
        Timeline.from_json(text, where="trace.json")
