"""Of a timeline that is too long to be drawn, its beginning and its end are."""

from __future__ import annotations

import functools
import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from penstock import Costs, Timeline, draw, schedules, simulate
from penstock.cli.sources import load_drawn, load_with_versions
from penstock.core.schedule.op import Kind
from penstock.core.timing.spans import BUSY
from penstock.drawing import stacked
from penstock.drawing.timeline.chrome import chrome
from penstock.drawing.timeline.excerpt import MOST_BOXES, excerpts, steady_part, whole_of
from penstock.drawing.timeline.labels import Names
from penstock.drawing.timeline.text import text

SVG = "{http://www.w3.org/2000/svg}"


def long_timeline(name="1f1b", ranks=2, microbatches=13_000, costs=None):
    built = schedules.build(name, num_ranks=ranks, num_microbatches=microbatches)
    return simulate(built, costs or Costs())


@functools.cache
def long():
    """Made by the first test that looks at it, not by whoever collects tests."""
    return long_timeline()


def boxes(picture):
    """(op, rank, start, end) of every op that a figure shows, by panel."""
    return [
        [
            (
                box.get("data-op"),
                *(float(box.get(f"data-{key}")) for key in ("rank", "start", "end")),
            )
            for box in panel.iter(f"{SVG}g")
            if box.get("class") == "span"
        ]
        for panel in ElementTree.fromstring(picture).iter(f"{SVG}g")
        if panel.get("class") == "panel"
    ]


def expected(timeline):
    return {
        (str(span.op), span.rank): (span.start, span.end)
        for span in timeline.spans
        if span.op.kind in BUSY
    }


def test_a_figure_shows_how_it_begins_and_how_it_ends():
    beginning, end = boxes(stacked([("long", long())]))
    times = expected(long())
    for op, rank, start, stop in (*beginning, *end):
        assert times[op, rank] == pytest.approx((start, stop))
    last_shown, first_shown = max(box[2] for box in beginning), min(box[2] for box in end)
    assert last_shown < first_shown
    shown = {box[:2] for box in (*beginning, *end)}
    for key, (start, _) in times.items():
        # Nothing is missing but what is between the two.
        assert key in shown or last_shown < start < first_shown
    assert min(len(beginning), len(end)) > 100
    assert len(shown) < 0.05 * MOST_BOXES


def test_the_titles_say_what_is_left_out_and_the_numbers_are_of_the_whole():
    picture = draw(long(), None)
    num_ops = sum(len(row.ops) for row in long().rows)
    left_out, total = re.search(r"\(([\d,]+) of ([\d,]+) ops left out\)", picture).groups()
    letters = len(re.findall(r"[FB]\d", picture))
    assert int(total.replace(",", "")) == num_ops == 52_000
    assert int(left_out.replace(",", "")) == num_ops - letters
    assert picture.count(f"makespan {long().makespan:.0f}, bubble {long().bubble:.1%}") == 2
    assert picture.count("peak 2") == 2
    figure = stacked([("long", long())])
    assert figure.count(f"makespan {long().makespan:.0f} · bubble {long().bubble:.1%}") >= 2


def test_text_of_the_end_is_that_of_a_short_schedule_with_larger_numbers():
    end = text(long()).split("\n\n")[1].splitlines()[1:]
    short = text(long_timeline(microbatches=40), width=240).splitlines()[1:]
    for ours, theirs in zip(end, short, strict=True):
        letters = re.sub(r"[^FB]", "", ours)
        assert re.sub(r"[^FB]", "", theirs).endswith(letters)
        assert len(letters) > 10


def test_what_is_held_goes_on_at_the_cut():
    (_, _), (_, end) = excerpts([("long", long())], 50)
    for rank, curve in enumerate(end.in_flight):
        first = min(row.starts[0] for row in end.rows)
        held = [held for time, held in long().in_flight[rank] if time <= first][-1]
        assert curve[0] == (first, held)
        assert curve[-1] == long().in_flight[rank][-1]
        assert curve[-1][1] == 0
        assert all(step >= 0 for _, step in curve)


def test_microbatches_keep_their_way_where_their_forward_is_left_out():
    timeline = long_timeline("chimera", 2, 13_002)
    (_, _), (_, end) = excerpts([("both ways", timeline)], 30)
    ours, theirs = Names(end), Names(timeline)
    for span in end.spans:
        assert ours.label(span.op, span.rank) == theirs.label(span.op, span.rank)
        assert ours.shade(span.op, span.rank) == theirs.shade(span.op, span.rank)
    assert whole_of(end) is timeline


def test_up_to_the_limit_everything_is_drawn_and_a_trace_always_is():
    most = long_timeline(microbatches=MOST_BOXES // 4)
    assert excerpts([("most", most)], 50) == [("most", most)]
    events = json.loads(chrome(long()))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 52_000


def test_ops_that_take_no_time_are_not_all_drawn():
    timeline = long_timeline(costs=Costs(0.0, 0.0, 0.0))
    assert len(text(timeline)) < 2_000


def test_versions_stay_with_their_ops():
    known = long().with_versions([list(range(len(row.ops))) for row in long().rows])
    (_, first), (_, last) = excerpts([("long", known)], 50)
    versions = {(span.op, span.rank): span.version for span in known.spans}
    for span in (*first.spans, *last.spans):
        assert span.version == versions[span.op, span.rank]
    assert isinstance(last, Timeline)
    assert last.has_versions


@pytest.mark.parametrize(("family", "updates"), [("pipedream", 6), ("pipedream-2bw", 2)])
def test_the_steady_state_has_no_beginning_and_no_end(family, updates):
    timeline = load_with_versions(family, 3, 18, Costs()).timeline
    part = steady_part(timeline, 6)
    assert part.rhythm == (6, pytest.approx(3), pytest.approx(0))
    entering = [op.microbatch for op in part.rows[0].ops if op.kind is Kind.FORWARD]
    assert entering == [*range(6, 12)]
    for row in part.rows:
        kinds = [op.kind for op in row.ops]
        assert kinds.count(Kind.FORWARD) == kinds.count(Kind.BACKWARD) == 6
        assert kinds.count(Kind.UPDATE) == updates
        assert all(a <= b for a, b in pairwise(row.starts))
    whole = {(span.op, span.rank): span for span in timeline.spans}
    for span in part.spans:
        same = whole[span.op, span.rank]
        assert same.start == pytest.approx(span.start + part.shift)
        assert same.version == span.version
    picture = draw(part, None)
    assert "in its steady state, from microbatch 6 on: one every 3, ranks idle 0.0%" in picture
    assert "bubble" not in picture
    assert "one every 3" in stacked([("x", part)])


def test_a_stream_with_idle_ranks_says_how_idle():
    timeline = load_with_versions("pipedream", 3, 18, Costs(1, 1, 1, hop=2.0)).timeline
    rhythm = steady_part(timeline, 6).rhythm
    assert rhythm.idle == pytest.approx(1 - 3 / rhythm.beat)
    assert rhythm.idle > 0.1


def test_a_stream_that_is_too_short_is_shown_whole():
    timeline = load_with_versions("pipedream", 3, 12, Costs()).timeline
    assert steady_part(timeline, 6) is timeline
    assert steady_part(timeline, 0) is timeline


def test_text_shows_so_much_of_a_steady_state_that_its_labels_can_be_read():
    part = steady_part(load_with_versions("pipedream", 3, 212, Costs()).timeline, 200)
    picture = text(part, versions=True, window=80)
    assert "from microbatch 6 on: one every 3" in " ".join(picture.split())
    first = next(line for line in picture.splitlines() if line.startswith("rank 0"))
    assert all(label in first for label in ("F6", "B4", "F9", "B7"))
    assert "F200" not in picture


@pytest.mark.parametrize("ranks", [4, 8, 30])
def test_a_long_stream_over_many_ranks_is_drawn_in_its_steady_state(ranks):
    source, versions = load_drawn("pipedream", ranks, 100_000, Costs())
    assert "in its steady state" in text(source.shown, versions=versions)
