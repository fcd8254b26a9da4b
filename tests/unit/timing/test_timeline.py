import json
from array import array

import pytest

from penstock import Costs, Op, Span, Timeline, schedules, simulate
from penstock.base.errors import FileError, InputError
from penstock.core.schedule.lower import add_updates
from penstock.core.schedule.rounds import Rounds
from penstock.core.timing.spans import Row, Transfer
from penstock.core.versions import DoubleBuffer, Latest, Stash, VerticalSync, trace
from penstock.drawing import TimelineRecord


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


def stream(policy, ranks=4, microbatches=24, family="pipedream"):
    """A predicted stream with what its ops read; minibatches are of as many as ranks."""
    plain = schedules.build(family, num_ranks=ranks, num_microbatches=microbatches)
    rounds = Rounds((1,) * ranks)
    if policy.updates == "minibatch":
        rounds = Rounds.of_minibatches((1,) * ranks, ranks, microbatches)
    lowered = add_updates(plain, rounds)
    versions = [trace(ops, policy, rounds, ranks).versions for ops in lowered.ranks]
    return simulate(lowered).with_versions(versions)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize(
    ("policy", "delay"),
    [
        (Stash(), lambda p, s: p - 1 - s),
        (Latest(), lambda p, s: p - 1 - s),
        (VerticalSync(), lambda p, s: p - 1),
        (DoubleBuffer(), lambda p, s: 1),
    ],
)
def test_delays_in_the_steady_state(policy, delay, ranks):
    delays = stream(policy, ranks, 6 * ranks).delays
    assert list(delays) == list(range(ranks))
    for stage, by_microbatch in delays.items():
        assert list(by_microbatch) == list(range(6 * ranks))
        steady = {by_microbatch[k] for k in range(2 * ranks, 6 * ranks)}
        assert steady == {delay(ranks, stage)}
        assert by_microbatch[0] == 0, "nothing is older than the first version"


def test_delays_of_a_timeline_that_shows_only_part_of_a_stream():
    """Microbatch 0 began before it, 5 and 7 end after it; the gradient of 4 is there with its W."""
    read = {
        "0B0": 0, "0UPDATE0": 0, "0F5": 1, "0B5": 1,
        "1F4": 6, "1I4": 6, "1UPDATE3": 8, "1W4": 6, "1UPDATE4": 9,
        "1F7": 6, "1I7": 6, "1UPDATE5": 10,
    }  # fmt: skip
    times = array("d", range(len(read)))
    row = Row(tuple(map(Op.parse, read)), times, times, tuple(read.values()))
    assert Timeline((row,)).delays == {1: {4: 3}}


def test_a_timeline_without_versions_says_so():
    plain = simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=2))
    assert not plain.has_versions
    assert {span.version for span in plain.spans} == {None}
    assert {row.versions for row in plain.rows} == {None}
    with pytest.raises(InputError, match="'1f1b' does not say which version"):
        plain.delays  # noqa: B018


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ([[0, 0]], "versions of 1 ranks, but the timeline has 2"),
        ([[0, 0], [0]], "rank 1 has 2 ops, but 1 versions"),
        ([[0, -2], [0, 0]], "a version on rank 0 is -2"),
    ],
)
def test_versions_that_do_not_fit_are_refused(versions, message):
    plain = timeline(("0F0", 0, 0, 1), ("0B0", 0, 1, 2), ("1F0", 1, 0, 1), ("1B0", 1, 1, 2))
    with pytest.raises(InputError, match=message):
        plain.with_versions(versions)


def test_versions_come_back_from_json_and_from_spans_in_any_order():
    shown = stream(Stash(), 3, 7)
    assert shown.has_versions
    assert Timeline.from_json(shown.to_json()) == shown
    assert Timeline.of(reversed(shown.spans), 3, shown.name).has_versions
    moved = Timeline.of(sorted(shown.spans, key=lambda span: str(span.op)), 3, shown.name)
    assert {span.op: span.version for span in moved.spans} == {
        span.op: span.version for span in shown.spans
    }


def test_an_idle_rank_and_messages_stay_what_they_are_in_json():
    rows = [Span(Op.parse("0F0"), 0, 0, 1, 4), Span(Op.parse("0SEND_F0"), 0, 1, 2)]
    shown = Timeline.of(rows, 2)
    assert [row.versions for row in shown.rows] == [(4, -1), None]
    assert [span.version for span in shown.spans] == [4, None]
    assert shown.has_versions
    assert Timeline.from_json(shown.to_json()) == shown
    assert shown.with_versions([(4, -1), ()]) == shown


def test_without_versions_a_file_is_what_it_was():
    shown = timeline(("0F0", 0, 0, 1))
    assert set(json.loads(shown.to_json())) == {"name", "source", "num_ranks", "spans"}
    record = TimelineRecord.of(shown)
    assert "versions" not in json.loads(record.to_json())
    versioned = stream(Stash(), 2, 3)
    assert TimelineRecord.from_json(TimelineRecord.of(versioned).to_json()).timeline() == versioned


def test_a_report_keeps_all_that_a_timeline_knows():
    stream = [Span(Op.parse("0F0"), 0, 0, 1), Span(Op.parse("0F1"), 0, 1, 2)]
    carried = [Transfer((0, 1), "sum", 0, 0, 2.0, 3.0)]
    shown = Timeline.of(stream, 2, "a", "measured", "newest", (0.0, 0.5), carried)
    record = TimelineRecord.of(shown)
    assert TimelineRecord.from_json(record.to_json()).timeline() == shown


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ([0], "2 spans, but 1 versions"),
        ([0, -2], "a version is -2"),
        (["0", 0], r"\$.versions\[0\]"),
    ],
)
def test_versions_in_a_file_are_read_strictly(versions, message):
    text = json.loads(timeline(("0F0", 0, 0, 1), ("0B0", 0, 1, 2)).to_json())
    with pytest.raises(FileError, match=f"trace.json.*{message}"):
        Timeline.from_json(json.dumps({**text, "versions": versions}), where="trace.json")
