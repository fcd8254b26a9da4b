"""Streams that a live source feeds, on the command line."""

from __future__ import annotations

import json

import pytest

from penstock.planning.plans import Plan, StagePlan
from tests.kit.command_line import refused, run

PARTIME = """\
partime (sideways), predicted, in its steady state, from microbatch 6 on: one every 3, ranks idle \
0.0%
rank 0 │F6─B2────F7─B3────F8─B4────F9─B5────F10B6────···│ peak 1
reads  │ 2  2     3  3     4  4     5  5     6  6       │
rank 1 │···F6─B4────F7─B5────F8─B6────F9─B7────F10B8────│ peak 1
reads  │    4  4     5  5     6  6     7  7     8  8    │
rank 2 │B5────F6─B6────F7─B7────F8─B8────F9─B9────F10···│ peak 1
reads  │ 5     6  6     7  7     8  8     9  9     10   │
reads: the version of the weights that the op above reads; version v has had v updates
"""


def test_partime_is_drawn_as_it_looks_while_it_goes_on(tmp_path):
    assert run("draw", "partime", "-p", 3, "-m", 5) == PARTIME
    whole = run("draw", "partime", "-p", 3, "-m", 5, "--versions").splitlines()
    assert "in its steady state" not in whole[0]
    assert whole[1].startswith("rank 0 │F0") and whole[2].startswith("reads  │ 0 ")
    stacked = run("compare", "partime", "pipedream", "-p", 3, "-m", 5)
    assert "F10B6" in stacked and "rank 0 │F0" in stacked
    run("draw", "partime", "-p", 3, "-m", 5, "-o", tmp_path / "partime.svg")
    assert "F10" in (tmp_path / "partime.svg").read_text()


def test_simulate_tells_rate_and_latency_of_what_a_source_feeds():
    light, paced, full, flushed = (
        json.loads(run("simulate", *asked, "-p", 4, "-m", 8, "--json"))
        for asked in (
            ("partime", "--arrivals", 0.1),
            ("partime",),
            ("partime", "--arrivals", 0.6),
            ("1f1b", "--arrivals", 0.1),
        )
    )
    assert [light["rate"], light["transit"], light["latency"]] == pytest.approx([0.1, 4, 4])
    assert [paced["rate"], paced["transit"], paced["latency"]] == pytest.approx([1 / 3, 4, 4])
    assert [full["rate"], full["transit"]] == pytest.approx([1 / 3, 12])
    assert full["latency"] > 20
    assert flushed["rate"] == pytest.approx(0.1)
    assert paced["peak_activations"] == [1] * 4 and paced["stage_bubble"] == pytest.approx(0)
    assert paced["num_hops"] == 2 * 3 * 8
    text = run("simulate", "partime", "-p", 4, "-m", 8)
    assert "rate  transit  latency" in text and "from its arrival" in text
    unfed = json.loads(run("simulate", "pipedream", "-p", 4, "-m", 8, "--json"))
    assert unfed["rate"] is unfed["latency"] is None
    both = run("compare", "partime", "pipedream", "-p", 3, "-m", 6)
    assert both.splitlines()[2].split()[-3:] == ["–"] * 3


def test_a_plan_is_shown_in_its_steady_state(tmp_path):
    seconds = {"forward_seconds": 0.01, "backward_weight_seconds": 0.02}
    stages = tuple(StagePlan(layers=(str(rank),), rank=rank, **seconds) for rank in range(3))
    path = tmp_path / "plan.json"
    Plan(model="m", schedule="partime", num_microbatches=1, stages=stages, rate=30).save(path)
    assert "│F6─B2────F7─B3────" in str(Plan.load(path))
    drawn = run("draw", path)
    assert "│F6─B2────F7─B3────" in drawn and "up to 33.33 frames/s" in drawn
    assert "an output 30 ms late at light load, 90 ms saturated" in drawn
    numbers = json.loads(run("simulate", path, "--arrivals", 10, "-m", 40, "--json"))
    assert numbers["rate"] == pytest.approx(10) and numbers["latency"] == pytest.approx(0.03)
    explained = json.loads(run("explain", path, "--json"))["explanation"]
    assert [stage["delay"] for stage in explained["stages"]] == [4, 2, 0]
    assert [stage["activations_in_flight"] for stage in explained["stages"]] == [1, 1, 1]
    assert [stage["versions_held"] for stage in explained["stages"]] == [1, 1, 1]
    assert "goes through what the newest forward of its stage has left" in run("explain", path)


REFUSED = {
    "-1.0 is not in the range x>0": ("simulate", "partime", "--arrivals", -1),
    "the policy sideways is for partime, not for pipedream": (
        "draw", "pipedream", "--policy", "sideways",
    ),
    "the policy stash is for pipedream, not for partime": ("draw", "partime", "--policy", "stash"),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_makes_no_sense_is_refused(message):
    assert message in refused(*REFUSED[message])


def test_what_has_happened_has_no_other_arrivals(tmp_path):
    run("draw", "partime", "-o", tmp_path / "trace.txt")
    from penstock import schedules, simulate

    path = tmp_path / "timeline.json"
    path.write_text(simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=2)).to_json())
    assert "has happened already; leave --arrivals out" in refused(
        "simulate", path, "--arrivals", 1
    )
