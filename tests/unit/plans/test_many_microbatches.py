"""Plans of very many microbatches: the same as those of which every op is simulated, from schedules
of some hundred."""

from __future__ import annotations

import re

import pytest

from penstock import plan, schedules
from penstock.core.schedule import families
from penstock.core.timing.timeline import Timeline
from penstock.drawing.timeline.excerpt import OPS_PER_RANK, excerpts
from penstock.planning.plans import Plan, StagePlan
from penstock.planning.plans.explanation import explain
from penstock.planning.plans.picture import drawn
from penstock.planning.plans.seconds import seconds_of_ranks
from penstock.planning.plans.stage_plan import bytes_of_ranks
from tests.kit.abridged import assert_same_numbers
from tests.kit.command_line import run
from tests.kit.planning import chain, devices, in_one_line

MANY = 1_203


def plan_of(schedule, num_microbatches=MANY, num_ranks=3, recompute="none", **more):
    """A plan whose stages differ by some percent, with messages and sums that take time."""
    options = more.get("options", {})
    small = schedules.build(schedule, num_ranks=num_ranks, num_microbatches=8, **options)
    stages = tuple(
        StagePlan(
            layers=(f"layer{stage}",),
            rank=min(small.ranks_of(stage)),
            forward_seconds=0.01 + 0.0004 * (5 * stage % 7),
            backward_input_seconds=0.01,
            backward_weight_seconds=0.01,
            update_seconds=0.002,
            hop_seconds=0.003,
            link_seconds=0.002,
            reduce_seconds=0.05,
            reduce_parts=4,
            reduce_steps=(0.04, 0.01) if small.copies[stage] > 1 else (),
            activation_bytes=1 << 20,
            weight_kept_bytes=1 << 19,
            input_bytes=1 << 10,
            recompute=recompute,
        )
        for stage in range(small.num_stages)
    )
    return Plan(
        model="m", schedule=schedule, num_microbatches=num_microbatches, stages=stages, **more
    )


PLANS = {
    "1f1b": {},
    "1f1b that recomputes": {"recompute": "stage"},
    "1f1b with unlike replicas": {"options": {"replicas": [2, 1]}},
    "zb-v": {},
    "pipelines of zb-v, whose sums take parts": {"num_ranks": 4, "options": {"replicas": [2] * 4}},
    "1f1b behind a card": {"cards": (0, 0, 1), "hosts": (0, 0, 1)},
    "zb-h1 behind cards, side by side": {
        "num_ranks": 6, "options": {"replicas": [3, 3]}, "cards": range(6), "hosts": range(6)
    },
    "gpipe": {},
}  # fmt: skip


def plan_called(name, num_microbatches=MANY):
    family = next(word for word in re.findall(r"[\w-]+", name) if word in families.names())
    given = {key: tuple(v) if key in ("cards", "hosts") else v for key, v in PLANS[name].items()}
    return plan_of(family, num_microbatches, **given)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_the_one_of_which_every_op_is_simulated(name):
    found = plan_called(name)
    schedule, timeline = found.build_schedule(), found.simulate()
    assert (found.placement.num_microbatches < MANY / 4) is (found.schedule != "gpipe")
    assert schedule.num_microbatches == MANY
    assert found.prediction.step is not None
    assert found.step_seconds == pytest.approx(timeline.makespan, rel=1e-9)
    assert found.rank_bytes == bytes_of_ranks(found.stages, schedule)
    assert found.prediction.bubble == pytest.approx(timeline.bubble, abs=1e-9)
    for parts, busy in zip(seconds_of_ranks(found), timeline.busy, strict=True):
        assert sum(parts) == pytest.approx(found.step_seconds, rel=1e-9)
        assert parts.busy == pytest.approx(busy, rel=1e-9)


@pytest.mark.parametrize("name", [name for name in PLANS if name != "gpipe"])
def test_a_picture_has_the_ends_of_the_whole_step(name):
    """It was a part of the middle, and on the command line all of it."""
    found = plan_called(name, 3 * MANY)
    whole, ends = found.simulate(), drawn(found).timeline
    assert sum(len(row.ops) for row in ends.rows) < sum(len(row.ops) for row in whole.rows) / 4
    assert_same_numbers(ends, whole)
    panels = (excerpts([("", timeline)], OPS_PER_RANK) for timeline in (ends, whole))
    for (_, ours), (_, theirs) in zip(*panels, strict=True):
        assert [row.ops for row in ours.rows] == [row.ops for row in theirs.rows]
        starts, same = ([span.start for span in part.spans] for part in (ours, theirs))
        assert starts == pytest.approx(same, rel=1e-9)
        moved, also = (part.transfers for part in (ours, theirs))
        assert {part[:4] for part in moved} == {part[:4] for part in also}
        assert len(moved) == len(also) > 20
        assert sum(part.start for part in moved) == pytest.approx(sum(part.start for part in also))


@pytest.fixture
def built(monkeypatch):
    """How many microbatches schedules were built for, and how many ops timelines had."""
    asked, build, made = [], families.build, Timeline.__init__

    def building(name, **options):
        asked.append(options["num_microbatches"])
        return build(name, **options)

    def making(self, rows, *more, **others):
        asked.append(sum(len(row.ops) for row in rows))
        made(self, rows, *more, **others)

    monkeypatch.setattr(families, "build", building)
    monkeypatch.setattr(Timeline, "__init__", making)
    return asked


def test_a_million_microbatches_are_planned_and_shown_from_some_hundred(built):
    found = plan(chain(5), devices(2), microbatches=1_000_000)
    assert "1000000 microbatches" in in_one_line(found)
    assert "in its steady state, from microbatch" in in_one_line(found)
    for task in (seconds_of_ranks, explain, drawn):
        task(found)
    assert Plan.from_json(found.to_json()).step_seconds == found.step_seconds
    assert max(built) < 50_000  # of which streams have most
    busiest = max(parts.busy for parts in seconds_of_ranks(found))
    assert busiest * (1 - 1e-9) <= found.step_seconds < 1.001 * busiest


@pytest.mark.parametrize("schedule", ["pipedream", "partime"])
def test_what_never_flushes_is_shown_from_some_thousand(schedule, built):
    found = plan_of(schedule, 1_000_000)
    assert "in the steady state" in in_one_line(found)
    drawn(found)
    explain(found)
    assert max(built) < 50_000


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_command_line_draws_a_million_from_some_hundred(schedule, tmp_path, monkeypatch):
    """It took a minute and more, nearly all for what was then left out."""
    ops, made = [], Timeline.__init__

    def making(self, rows, *more, **others):
        ops.append(sum(len(row.ops) for row in rows))
        made(self, rows, *more, **others)

    monkeypatch.setattr(Timeline, "__init__", making)
    path = tmp_path / "drawn.svg"
    run("draw", schedule, "-p", "4", "-m", "1000000", "-o", path)
    assert max(ops) < 50_000
    assert path.stat().st_size < 5e6
    if schedule == "1f1b":
        assert re.search(
            r"its beginning \(7,99\d,\d{3} of 8,000,000 ops left out\)", path.read_text()
        )
