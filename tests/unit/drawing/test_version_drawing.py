"""Pictures that say which version of the weights each op read."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from penstock import Costs, Op, Schedule, Timeline, draw, errors, schedules, simulate
from penstock.core.schedule.lower import add_update, add_updates, lower
from penstock.core.schedule.rounds import Rounds
from penstock.core.versions import DoubleBuffer, Latest, Policy, Stash, VerticalSync, trace
from penstock.drawing.markup import text_width
from penstock.drawing.pages import page
from penstock.drawing.timeline.svg import svg
from penstock.drawing.timeline.text import text

SVG = "{http://www.w3.org/2000/svg}"


def stream(ranks: int, microbatches: int, policy: Policy, costs: Costs | None = None) -> Timeline:
    """A predicted stream of PipeDream, with what its ops read; minibatches are of ``ranks``."""
    plain = schedules.build("pipedream", num_ranks=ranks, num_microbatches=microbatches)
    each = (1,) * ranks
    by_minibatch = Rounds.of_minibatches(each, ranks, microbatches)
    rounds = Rounds(each) if policy.updates == "microbatch" else by_minibatch
    lowered = add_updates(plain, rounds)
    versions = [trace(ops, policy, rounds, ranks).versions for ops in lowered.ranks]
    return simulate(lowered, costs).with_versions(versions)


STASH = stream(3, 6, Stash())


def spans(picture: str) -> dict[str, ElementTree.Element]:
    """The elements of the ops, by op."""
    tree = ElementTree.fromstring(picture)
    found = [one for one in tree.iter(f"{SVG}g") if one.get("class") == "span"]
    return {one.get("data-op"): one for one in found}


def written(span: ElementTree.Element) -> list[str | None]:
    return [one.text for one in span.findall(f"{SVG}text")]


def band_colour(span: ElementTree.Element) -> str:
    return next(c for one in span.findall(f"{SVG}rect") if (c := one.get("class", ""))[:1] == "v")


def test_text_has_the_version_under_each_op():
    assert draw(STASH, versions=True) == (
        "pipedream, predicted: makespan 24, bubble 25.0%, stage bubble 25.0%\n"
        "rank 0 │F0F1F2········B0──F3B1──F4B2──F5B3──··B4──··B5──│ peak 3\n"
        "reads  │ 0 0 0         0   1 0   2 0   3 1     2     3  │\n"
        "rank 1 │··F0F1····B0──F2B1──F3B2──F4B3──F5B4──··B5──····│ peak 2\n"
        "reads  │   0 0     0   1 0   2 1   3 2   4 3     4      │\n"
        "rank 2 │····F0B0──F1B1──F2B2──F3B3──F4B4──F5B5──········│ peak 1\n"
        "reads  │     0 0   1 1   2 2   3 3   4 4   5 5          │\n"
        "reads: the version of the weights that the op above reads; version v has had v updates"
    )


def test_text_keeps_to_a_terminal_and_every_version_can_be_told_from_its_neighbour():
    twelve = stream(4, 12, Stash())
    drawn = text(twelve, versions=True).splitlines()
    assert max(map(len, drawn)) <= 120
    for rank in range(4):
        boxes, reads = (line.split("│")[1] for line in drawn[1 + 2 * rank : 3 + 2 * rank])
        labels = re.findall(r"[FB]?\d+", boxes)
        assert [label.strip("FB") for label in labels] == [
            str(span.op.microbatch) for span in twelve.by_rank[rank] if span.op.kind != "UPDATE"
        ]
        assert reads.split() == [
            str(span.version) for span in twelve.by_rank[rank] if span.op.kind != "UPDATE"
        ]


def test_text_without_room_has_dots():
    drawn = text(stream(4, 70, Stash()), width=213, versions=True).splitlines()
    forwards, reads = (line.split("│")[1] for line in drawn[1:3])
    assert forwards.startswith("FFFF·")
    assert reads.startswith("···· ")
    assert set(reads) <= set("·0123456789 ")
    assert [one for one in reads.replace("·", " ").split() if not one.isdigit()] == []


def test_updates_with_a_length_have_no_number_in_text():
    slow = stream(2, 3, Stash(), Costs(update=1.0))
    boxes, reads = (line.split("│")[1] for line in text(slow, versions=True).splitlines()[1:3])
    assert boxes.count("U") == 3
    assert len(reads.split()) == 6


@pytest.mark.parametrize("policy", [Stash(), VerticalSync(), DoubleBuffer(), Latest()])
def test_svg_says_what_each_op_read_in_box_colour_and_words(policy):
    timeline = stream(3, 9, policy)
    drawn = spans(svg(timeline, versions=True))
    for span in timeline.spans:
        one = drawn[str(span.op)]
        title = one.find(f"{SVG}title").text
        if span.op.kind == "UPDATE":
            assert title.endswith(f"makes version {span.version + 1}")
        else:
            assert title.endswith(f"reads version {span.version}")
            assert written(one)[1] == f"v{span.version}"
            assert band_colour(one) == f"v{span.version % 6}"


def test_a_band_is_inside_its_box_below_the_label_and_without_words_where_they_do_not_fit():
    picture = svg(stream(2, 120, Stash()), width=3000, versions=True)
    seen = set()
    for one in spans(picture).values():
        box, *band = one.findall(f"{SVG}rect")
        if not band:
            continue
        left, width = float(band[0].get("x")), float(band[0].get("width"))
        assert float(box.get("x")) <= left + 0.01
        assert left + width <= float(box.get("x")) + float(box.get("width")) + 0.01
        bottom = float(band[0].get("y")) + float(band[0].get("height"))
        assert bottom == pytest.approx(float(box.get("y")) + float(box.get("height")))
        words = [t for t in one.findall(f"{SVG}text") if t.get("class") == "version"]
        seen.add(words[0].text[:1] if words else "")
        assert all(text_width(word.text, 9) <= width for word in words)
        labels = [t for t in one.findall(f"{SVG}text") if t.get("class") != "version"]
        half_way = float(band[0].get("y")) - (float(box.get("height")) - 12) / 2
        assert all(0 < float(label.get("y")) - half_way < 6 for label in labels)
    assert seen >= {"v", ""}, "both wide and narrow boxes were looked at"


def test_an_update_that_takes_no_time_is_a_tick_over_its_neighbours():
    picture = svg(STASH, versions=True)
    drawn = spans(picture)
    tick, box = drawn["0UPDATE0"].find(f"{SVG}rect"), drawn["0B0"].find(f"{SVG}rect")
    assert float(tick.get("height")) > float(box.get("height"))
    assert tick.get("class") == "U s0"
    assert list(drawn).index("0UPDATE0") > list(drawn).index("0F3")
    slow = spans(svg(stream(2, 3, Stash(), Costs(update=1.0)), versions=True))
    assert written(slow["0UPDATE0"]) == ["U"]
    assert float(slow["0UPDATE0"].find(f"{SVG}rect").get("width")) > 10


def test_the_legend_explains_the_bands_only_where_there_are_some():
    assert "v2: weights read, after 2 updates" in svg(STASH, versions=True)
    for without in (svg(STASH), page(STASH), text(STASH)):
        assert "weights read" not in without
        assert "reads" not in without


def test_without_being_asked_pictures_do_not_change():
    bare = Timeline(tuple(row._replace(versions=None) for row in STASH.rows), STASH.name)
    assert svg(STASH) == svg(bare)
    assert text(STASH) == text(bare)
    assert page(STASH) == page(bare)


def test_html_tells_it_on_hover(tmp_path):
    html = draw(STASH, tmp_path / "x.html", versions=True)
    title = re.search(r"<title>(0F3: [^<]*)</title>", html)
    assert title[1].endswith("; reads version 1")


def test_chrome_trace_has_it_among_the_facts(tmp_path):
    def versions(**options):
        events = json.loads(draw(STASH, tmp_path / "x.json", **options))["traceEvents"]
        return {one["name"]: one["args"].get("version") for one in events if one["ph"] == "X"}

    shown = versions(versions=True)
    assert shown == {str(span.op): span.version for span in STASH.spans}
    assert shown["0F3"] == 1
    assert set(versions().values()) == {None}


def test_a_flushed_minibatch_with_messages_slices_and_stages_of_a_rank_is_drawn(tmp_path):
    for family, options in (("zb-v", {}), ("seq1f1b", {}), ("chimera", {})):
        plain = schedules.build(family, num_ranks=2, num_microbatches=2, **options)
        for schedule in (add_update(plain), lower(plain)):
            timeline = simulate(schedule, Costs(hop=0.5))
            none = {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "FREE", "FREE_I", "REDUCE"}
            read = [[-1 if op.kind in none else 0 for op in row.ops] for row in timeline.rows]
            known = timeline.with_versions(read)
            for suffix in ("svg", "html", "txt", "json"):
                draw(known, tmp_path / f"x.{suffix}", versions=True)
            drawn = spans(svg(known, versions=True))
            assert written(drawn["0F0"])[1] == "v0"


def test_edges_are_pictures_too():
    for timeline in (
        Timeline(()),
        Timeline.of((), 2),
        simulate(Schedule.parse("0F0,0B0"), Costs(0, 0, 0)).with_versions([[0, 0]]),
    ):
        ElementTree.fromstring(svg(timeline, versions=True))
        assert text(timeline, versions=True).endswith("updates")


@pytest.mark.parametrize("suffix", ["svg", "html", "txt", "json"])
def test_what_is_not_known_is_not_drawn(suffix, tmp_path):
    unknown = simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=2))
    with pytest.raises(errors.InputError, match="does not say which version"):
        draw(unknown, tmp_path / f"x.{suffix}", versions=True)
    assert not list(tmp_path.iterdir())


def test_an_op_that_reads_nothing_has_no_band():
    timeline = simulate(Schedule.parse("0F0,0B0")).with_versions([[-1, 3]])
    drawn = spans(svg(timeline, versions=True))
    assert len(drawn["0F0"].findall(f"{SVG}rect")) == 1
    assert "version" not in drawn["0F0"].find(f"{SVG}title").text
    assert written(drawn["0B0"]) == ["B0", "v3"]
    assert timeline.spans[0] == (Op.parse("0F0"), 0, 0.0, 1.0, None)
