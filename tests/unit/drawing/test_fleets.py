"""Pictures of fleets, and the files of their timelines."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

import penstock as pk
from penstock.base.errors import FileError, InputError
from penstock.core.timing.fleet_timeline import FleetTimeline, Turn
from penstock.drawing import draw_fleets
from penstock.drawing.fleets import fleet_svg
from penstock.planning.turns import StageVisit, TimedJob, simulate_fleet

OWN = [
    StageVisit(0),
    StageVisit(1, backward=True, seconds=3.0, fetch_seconds=1.0),
    StageVisit(0, backward=True),
]


def fleet(steps=2, jobs=3, **options):
    return simulate_fleet([TimedJob(f"job<{n}>", OWN, steps) for n in range(jobs)], 2, **options)


def test_as_text_every_job_has_a_letter():
    text = pk.draw(fleet(policy="whole"))
    head, first, second, *jobs = text.splitlines()
    assert head.startswith("3 jobs on 2 devices, whole, predicted: ")
    assert "idle 2" in head
    assert set(re.findall(r"[a-z]", first.split("│")[1])) == {"a", "c"}
    assert set(second.split("│")[1]) == {"b", "·"}
    assert [line[:9] for line in jobs] == ["a  job<0>", "b  job<1>", "c  job<2>"]


def test_as_svg_every_turn_is_a_box_of_its_jobs_colour(tmp_path):
    timeline = fleet()
    svg = draw_fleets([("predicted", timeline), ("again", timeline)], tmp_path / "fleet.svg")
    root = ElementTree.fromstring(svg)
    boxes = [node for node in root.iter() if node.get("class", "").startswith(("j0 ", "j2 "))]
    assert len(boxes) == 2 * 2 * 2 * len(OWN)
    titles = [node.text for node in root.iter() if node.tag.endswith("title")]
    assert titles.count("job<2>, step 1, 1B") == 2
    assert (tmp_path / "fleet.svg").read_text().strip() == svg.strip()


def test_a_long_one_is_drawn_in_stretches_of_two_pixels():
    long = fleet(steps=2000)
    assert len(long.turns) == 18_000
    assert fleet_svg([("", long)]).count("<rect") < 1_200


def test_a_timeline_is_a_file():
    timeline = fleet()
    assert FleetTimeline.from_json(timeline.to_json()) == timeline
    for turn, match in (
        (Turn(2, "a", 0, 0, False, 0.0, 1.0), "device 2 belongs to no"),
        (Turn(0, "b", 0, 0, False, 0.0, 1.0), "'b' on device 0 belongs"),
        (Turn(0, "a", 0, 0, False, 2.0, 1.0), "starts at 2.0 and ends at 1.0"),
    ):
        with pytest.raises(InputError, match=match):
            FleetTimeline(jobs=("a",), num_devices=2, turns=(turn,))
    with pytest.raises(FileError, match="not a valid FleetTimeline"):
        FleetTimeline.from_json('{"jobs": ["a"]}')
    with pytest.raises(InputError, match=r"end the name in .txt, .svg"):
        pk.draw(timeline, "fleet.html")
