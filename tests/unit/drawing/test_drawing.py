import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from penstock import Costs, Kind, Op, Schedule, Span, Timeline, draw, errors, schedules, simulate
from penstock.base.units import four_digits, picture_bytes, picture_seconds
from penstock.core.schedule.lower import add_communication, add_recompute, add_update, lower
from penstock.core.timing.spans import BUSY
from penstock.drawing import draw_stacked, markup, stacked
from penstock.drawing.chart import line_chart, thinned
from penstock.drawing.markup import (
    escaped,
    shortened,
    text_width,
    tick_label,
    ticks,
    without_beginning,
)
from penstock.drawing.pages import page
from penstock.drawing.timeline.labels import Names
from penstock.drawing.timeline.svg import svg
from penstock.drawing.timeline.text import columns_of_shortest, stacked_text, text
from tests.kit.paths import GOLDEN

SVG = "{http://www.w3.org/2000/svg}"
NBSP = "\N{NO-BREAK SPACE}"

ONE_F_ONE_B = simulate(schedules.build("1f1b", num_ranks=4, num_microbatches=8))
SPLIT = simulate(
    Schedule.parse(
        "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1\n"
        "1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1"
    )
)


def later(row):
    """The row of a timeline that does not start at 0."""
    starts, ends = ([time + 5 for time in times] for times in (row.starts, row.ends))
    return row._replace(starts=starts, ends=ends)


def in_seconds(ranks=2, microbatches=8, source="measured"):
    plain = schedules.build("1f1b", num_ranks=ranks, num_microbatches=microbatches)
    costs = Costs(0.0105, 0.0098, 0.0094, hop=0.0006, update=0.004)
    timeline = simulate(add_communication(add_update(plain)), costs)
    return Timeline(timeline.rows, timeline.name, source)


RECOMPUTED = simulate(
    add_recompute(schedules.build("1f1b", num_ranks=2, num_microbatches=3)), Costs(hop=0.5)
)
SLICED = simulate(
    Schedule.parse(
        "0F0,0F0.1,0F1,0F1.1,0B0.1,0B0,0B1.1,0B1\n1F0,1F0.1,1B0.1,1B0,1F1,1F1.1,1B1.1,1B1"
    )
)
BOTH_WAYS = simulate(schedules.build("chimera", num_ranks=4, num_microbatches=8))


CASES = {
    "1f1b": ONE_F_ONE_B,
    "two stages per rank": SPLIT,
    "measured": in_seconds(),
    "no spans": Timeline.of((), 1),
    "no ranks": Timeline(()),
    "no time": simulate(Schedule.parse("0F0,0B0"), Costs(0, 0, 0)),
    "one rank": simulate(schedules.build("gpipe", num_ranks=1, num_microbatches=3)),
    "large": simulate(schedules.build("1f1b", num_ranks=16, num_microbatches=64)),
    "tiny": simulate(Schedule.parse("0F0,0B0"), Costs(3e-4, 3e-4, 4e-4)),
    "huge": simulate(Schedule.parse("0F0,0B0"), Costs(1e12, 1e12, 1e12)),
    "recomputed": RECOMPUTED,
    "sliced": SLICED,
    "two pipelines": BOTH_WAYS,
    "everything": simulate(lower(schedules.build("zb-v", num_ranks=2, num_microbatches=3))),
    "late": Timeline(tuple(map(later, SPLIT.rows))),
}


def elements(picture, class_):
    tree = ElementTree.fromstring(picture)
    return [one for one in tree.iter() if class_ in one.get("class", "").split()]


def busy(timeline):
    return [span for span in timeline.spans if span.op.kind in BUSY]


@pytest.mark.parametrize("timeline", CASES.values(), ids=CASES.keys())
def test_svg_has_a_box_for_every_busy_span(timeline):
    boxes = elements(svg(timeline), "span")
    assert [(one.get("data-op"), int(one.get("data-rank"))) for one in boxes] == [
        (str(span.op), span.rank) for span in busy(timeline)
    ]
    for one, span in zip(boxes, busy(timeline), strict=True):
        assert float(one.get("data-start")) == pytest.approx(span.start)
        assert float(one.get("data-end")) == pytest.approx(span.end)
        assert one.find(f"{SVG}title").text.startswith(f"{span.op}: ")


@pytest.mark.parametrize("timeline", CASES.values(), ids=CASES.keys())
def test_nothing_leaves_the_picture(timeline):
    tree = ElementTree.fromstring(svg(timeline))
    width, height = float(tree.get("width")), float(tree.get("height"))
    for one in [*tree.iter(f"{SVG}rect"), *tree.iter(f"{SVG}text")]:
        x, y = float(one.get("x", 0)), float(one.get("y", 0))
        assert math.isfinite(x) and math.isfinite(y)
        assert -1 <= x <= x + float(one.get("width", 0)) <= width + 0.01
        assert -1 <= y <= y + float(one.get("height", 0)) <= height + 0.01


@pytest.mark.parametrize("timeline", CASES.values(), ids=CASES.keys())
def test_labels_stay_inside_their_boxes(timeline):
    for one in elements(svg(timeline), "span"):
        text, box = one.find(f"{SVG}text"), one.find(f"{SVG}rect")
        if text is not None:
            size = float(re.fullmatch(r"font-size:([\d.]+)px", text.get("style"))[1])
            assert text_width(text.text, size) < float(box.get("width"))


def test_labels_are_those_of_the_text_drawing():
    for timeline in (ONE_F_ONE_B, SPLIT, RECOMPUTED, SLICED, BOTH_WAYS):
        drawn = [one.find(f"{SVG}text").text for one in elements(svg(timeline), "span")]
        assert drawn == [Names(timeline).label(span.op, span.rank) for span in timeline.spans]


def test_where_labels_do_not_fit_the_microbatch_remains_or_nothing():
    drawn = [one.find(f"{SVG}text") for one in elements(svg(CASES["large"]), "span")]
    assert {text.text for text in drawn if text is not None} == {str(k) for k in range(64)}


def test_long_numbers_do_not_take_the_short_ones_with_them():
    many = simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=120))
    drawn = [one.find(f"{SVG}text") for one in elements(svg(many, width=6000), "span")]
    labels = {text.text for text in drawn if text is not None}
    assert labels >= {str(k) for k in range(100)} and "119" not in labels


def test_kinds_and_stages_differ_in_fill():
    fills = {}
    for one in elements(svg(SPLIT), "span"):
        box = one.find(f"{SVG}rect")
        op = Op.parse(one.get("data-op"))
        fills.setdefault((op.kind, op.stage), set()).add(box.get("class") or box.get("fill"))
    assert all(len(found) == 1 for found in fills.values())
    assert len({(*found,) for found in fills.values()}) == 3 * 2
    defined = {one.get("id") for one in ElementTree.fromstring(svg(SPLIT)).iter(f"{SVG}pattern")}
    assert {f"url(#{name})" for name in defined} == {
        fill for found in fills.values() for fill in found if fill.startswith("url")
    }


def test_a_recomputed_forward_is_no_forward_without_colour_either():
    picture = svg(RECOMPUTED)
    fills = {
        Op.parse(one.get("data-op")).kind: one.find(f"{SVG}rect").get("fill")
        for one in elements(picture, "span")
    }
    assert fills[Kind.RECOMPUTE] == "url(#penstock-R0)" and fills[Kind.FORWARD] is None
    assert elements(picture, "bars")
    assert "R recomputed forward" in picture
    assert "R0" in text(RECOMPUTED)


def test_slices_are_named():
    names = Names(SLICED)
    assert names.label(Op.parse("0F1"), 0) == "F1.0"
    assert names.label(Op.parse("1B0.1"), 1) == "B0.1"
    assert "0B0.1: backward, stage 0, microbatch 0, slice 1, rank 0" in svg(SLICED)


def test_where_pipelines_run_both_ways_the_shade_tells_which():
    """A microbatch has one shade on all ranks, and needs no letter for its stage."""
    shades = {}
    for one in elements(svg(BOTH_WAYS), "span"):
        shade = one.find(f"{SVG}rect").get("class").split()[1]
        shades.setdefault(Op.parse(one.get("data-op")).microbatch, set()).add(shade)
    assert shades == {k: {"s0"} if k in (0, 1, 4, 5) else {"s3"} for k in range(8)}
    names = Names(BOTH_WAYS)
    labels = {names.label(span.op, span.rank) for span in BOTH_WAYS.spans}
    assert labels == {f"{kind}{k}" for kind in "FB" for k in range(8)}
    assert "paler: microbatches that start on rank 3" in svg(BOTH_WAYS)


def test_where_a_rank_has_several_stages_labels_are_the_ops_own_names():
    """So that what an error speaks of is found in the picture."""
    four = schedules.build("interleaved-1f1b", num_ranks=2, num_microbatches=2, stages_per_rank=4)
    timeline = simulate(four)
    names = Names(timeline)
    assert {names.label(span.op, span.rank) for span in timeline.spans} == {
        str(span.op) for span in timeline.spans
    }
    assert "1F0: of stage 1; later stages of a rank are paler" in svg(timeline)
    assert "of a rank are paler" not in svg(ONE_F_ONE_B)
    assert Names(ONE_F_ONE_B).label(Op.parse("3F1"), 3) == "F1"


def test_labels_that_begin_with_a_digit_do_not_run_into_each_other_as_text():
    drawn = text(SPLIT).splitlines()[1]
    assert re.match(r"rank 0 │(0F\d─)+(·|─)*3F0─", drawn), drawn


def test_waiting_is_drawn_but_is_no_span():
    assert elements(svg(in_seconds()), "wait")
    assert not elements(svg(ONE_F_ONE_B), "wait")


@pytest.mark.parametrize(
    ("timeline", "axis", "makespan"),
    [
        (ONE_F_ONE_B, "time (units of the costs)", "makespan 33 ·"),
        (in_seconds(), "time (ms)", f"makespan 276.1{NBSP}ms ·"),
        (in_seconds(source="predicted"), "time (ms)", f"makespan 276.1{NBSP}ms ·"),
        (CASES["tiny"], "time (ms)", f"makespan 1{NBSP}ms ·"),
    ],
)
def test_times_have_a_unit(timeline, axis, makespan):
    texts = [one.text for one in ElementTree.fromstring(svg(timeline)).iter(f"{SVG}text")]
    assert axis in texts
    assert any(text.startswith(makespan) and "stage bubble" in text for text in texts)


def test_the_unit_can_be_chosen():
    assert "time (s)" in svg(ONE_F_ONE_B, unit="seconds")
    assert "time (units of the costs)" in svg(in_seconds(), unit="abstract")


def test_the_width_can_be_chosen():
    assert 'width="640"' in svg(ONE_F_ONE_B, width=640)


def test_stacked_timelines_share_one_axis():
    short, long = ONE_F_ONE_B, simulate(Schedule.parse("0F0,0B0"), Costs(40, 20, 6))
    picture = stacked({"short": short, "long": long})
    assert len(elements(picture, "span")) == len(short.spans) + len(long.spans)
    assert len(elements(picture, "panel")) == 2
    assert picture.count("time (units of the costs)") == 1
    tracks = [float(one.get("width")) for one in elements(picture, "track") if one.get("height")]
    assert tracks[0] / tracks[4] == pytest.approx(short.makespan / long.makespan, abs=1e-3)
    assert stacked([("short", short), ("long", long)]) == picture


def test_stacked_text_shares_one_axis():
    zero_bubble = simulate(
        schedules.build("zb-h1", num_ranks=4, num_microbatches=8), Costs(0.5, 0.5, 0.5)
    )
    first, second = stacked_text([("a", ONE_F_ONE_B), ("b", zero_bubble)]).split("\n\n")
    assert first.startswith("a, predicted: makespan 33") and second.startswith("b, ")
    lengths = [len(picture.splitlines()[1].split("│")[1]) for picture in (first, second)]
    assert lengths[0] / lengths[1] == 33 / 13.5
    assert first.splitlines()[1].startswith("rank 0 │F0──F1──"), "an op of 1 is as long as two of ½"
    assert second.splitlines()[1].startswith("rank 0 │F0F1")
    assert stacked_text([("b", zero_bubble), ("a", ONE_F_ONE_B)]) == f"{second}\n\n{first}"


def test_text_too_long_for_labels_keeps_letters_of_one_kind_or_none():
    drawn = text(CASES["large"], width=250)
    assert re.fullmatch("[FB·─]+", drawn.splitlines()[1].split("│")[1])
    assert columns_of_shortest([ONE_F_ONE_B], 66) == 2


def test_the_same_pictures_stacked_in_files(tmp_path):
    titled = [("a", ONE_F_ONE_B), ("b", SPLIT)]
    assert draw_stacked(titled, tmp_path / "x.svg") == stacked(titled)
    html = draw_stacked(titled, tmp_path / "x.html")
    assert Page(html).references == [] and html.count('class="panel"') == 2
    assert draw_stacked(titled, tmp_path / "x.txt") == stacked_text(titled)
    with pytest.raises(errors.InputError, match=r"\.txt, \.svg, \.pdf, \.png, \.html$"):
        draw_stacked(titled, tmp_path / "x.json")


def test_nothing_stacked_is_still_a_picture():
    ElementTree.fromstring(stacked({}))


def test_names_are_escaped():
    hostile = "<script>\"&'\x00\x1b</script>"
    timeline = Timeline(ONE_F_ONE_B.rows, hostile)
    ElementTree.fromstring(svg(timeline))
    assert "<script>" not in svg(timeline)
    html = page(timeline)
    assert html.count("<script>") == 1 and "\x00" not in html
    assert escaped("a<b\x00") == "a&lt;b\N{REPLACEMENT CHARACTER}"


def test_long_names_are_cut_not_clipped():
    cut = shortened("x" * 1000, 15, 300)
    assert cut.endswith("…") and text_width(cut, 15) <= 300
    picture = svg(Timeline(ONE_F_ONE_B.rows, "x" * 1000))
    assert all(len(one.text) < 100 for one in elements(picture, "title"))


@pytest.mark.parametrize("suffix", ["svg", "html", "json", "txt"])
def test_the_same_timeline_gives_the_same_bytes(suffix, tmp_path):
    again = Timeline.from_json(in_seconds().to_json())
    draw(in_seconds(), tmp_path / f"a.{suffix}")
    draw(again, tmp_path / f"b.{suffix}")
    assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


@pytest.mark.parametrize("suffix", ["svg", "txt"])
def test_golden_drawing(suffix, tmp_path):
    """If a change of the picture is meant, write it anew: ``draw(timeline, path)``."""
    golden = GOLDEN / f"drawing_1f1b_p4_m8.{suffix}"
    draw(ONE_F_ONE_B, tmp_path / golden.name)
    assert (tmp_path / golden.name).read_bytes() == golden.read_bytes()


def test_unknown_suffix_names_the_known_ones(tmp_path):
    with pytest.raises(errors.InputError, match=r"\.txt, \.svg, \.pdf, \.png, \.html, \.json"):
        draw(ONE_F_ONE_B, tmp_path / "picture.jpeg")
    assert not list(tmp_path.iterdir())


def test_chrome_trace(tmp_path):
    timeline = in_seconds()
    trace = json.loads(draw(timeline, tmp_path / "trace.json"))
    events = {phase: [e for e in trace["traceEvents"] if e["ph"] == phase] for phase in "XMC"}
    assert sum(map(len, events.values())) == len(trace["traceEvents"])
    assert len(events["X"]) == len(timeline.spans)
    for event, span in zip(events["X"], timeline.spans, strict=True):
        assert (event["name"], event["cat"], event["tid"]) == (
            str(span.op),
            span.op.kind,
            span.rank,
        )
        assert event["ts"] == pytest.approx(span.start * 1e6)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6)
        assert (event["args"]["microbatch"], event["args"]["slice"]) == span.op[2:]
    names = {e["tid"]: e["args"]["name"] for e in events["M"] if e["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    assert max(event["args"]["microbatches"] for event in events["C"]) == 2


class Page(HTMLParser):
    """What a page refers to, and how its tags nest."""

    VOID = frozenset({"meta", "br", "rect", "path", "circle"})

    def __init__(self, text):
        super().__init__()
        self.open, self.references = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("timeline", CASES.values(), ids=CASES.keys())
def test_html_is_one_well_formed_file_without_network(timeline):
    html = page(timeline)
    assert Page(html).references == []
    assert "http://" not in html and "https://" not in html
    assert html.count('class="span"') == len(busy(timeline))


def test_chart_leaves_out_what_is_no_number():
    points = [(0, 3.0), (1, math.nan), (2, None), (3, math.inf), (4, 2.0)]
    chart = line_chart([("training", points), ("empty <b>", [])], "step", "loss")
    assert len(elements(chart, "point")) == 2
    assert "nan" not in chart and "training, last 2" in chart
    ElementTree.fromstring(line_chart([], "step", "loss"))
    ElementTree.fromstring(line_chart([("constant", [(5, 1.0), (5, 1.0)])], "step", "loss"))


def test_thinning_keeps_ends_and_extremes():
    points = [(float(x), math.sin(x)) for x in range(10_000)]
    points[5_432] = (5432.0, 99.0)
    kept = thinned(points)
    assert len(kept) < 700 and points[5_432] in kept
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert thinned(points[:50]) == points[:50]


@pytest.mark.parametrize("low", [0.0, -3.0, 2.301])
@pytest.mark.parametrize("length", [1e-9, 0.004, 1.0, 33.0, 7e11])
def test_ticks_are_round_and_inside(low, length):
    marks = ticks(low, low + length, 8)
    assert 2 <= len(marks) <= 9
    assert all(low - 1e-9 * length <= mark <= low + length * (1 + 1e-9) for mark in marks)


def test_numbers():
    assert (four_digits(12340), four_digits(0.12345), four_digits(3.3e8)) == (
        "12340",
        "0.1235",
        "3.3e+08",
    )
    assert picture_seconds(0.0105) == f"10.5{NBSP}ms" and picture_seconds(2e-6) == f"2{NBSP}µs"
    assert [picture_bytes(n).replace(NBSP, " ") for n in (0, 1023, 1024, 9.4e6, 5e15)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "8.96 MiB",
        "4547 TiB",
    ]
    assert tick_label(-0.0) == "0" and ticks(1, 1, 5) == [1]


def test_a_span_of_another_stage_than_computed_here_is_drawn():
    update = Timeline.of((Span(Op.parse("3UPDATE0"), 0, 0.0, 1.0),), 1)
    assert len(elements(svg(update), "span")) == 1


def test_more_lines_than_can_be_told_apart_are_a_chart_each():
    series = [(f"run {k} & <co>", [(x, k + 0.1 * x) for x in range(50)]) for k in range(7)]
    tree = ElementTree.fromstring(line_chart(series, "step", "loss"))
    texts = [text.text for text in tree.iter(f"{SVG}text")]
    groups = list(tree.iter(f"{SVG}g"))
    assert len(groups) == 7
    for number, group in enumerate(groups):
        assert group.find(f"{SVG}title").text == f"run {number} & <co>, last {number + 4.9:.4g}"
        classes = [path.get("class") for path in group.iter(f"{SVG}path")]
        assert classes.count("line k0") == 1 and classes.count("grid") == 6
    assert "loss by step" in texts
    few = ElementTree.fromstring(line_chart(series[:6], "step", "loss"))
    assert not list(few.iter(f"{SVG}g"))


@pytest.mark.parametrize("cut", [shortened, without_beginning])
def test_a_long_name_is_measured_a_few_times_and_not_once_for_each_of_its_letters(cut, monkeypatch):
    measured, em = [], markup._em

    def counting(character):
        measured.append(character)
        return em(character)

    monkeypatch.setattr(markup, "_em", counting)
    name = "layer." * 2000 + "end"
    assert text_width(cut(name, 12, 300), 12) <= 300
    assert len(measured) <= 4 * len(name)
    assert without_beginning(name, 12, 300).endswith("layer.end")
