"""The beginning and the end of a step of very many microbatches are those of the whole step."""

from __future__ import annotations

import pytest

from penstock import Costs, schedules, simulate
from penstock.core.timing.abridged import AbridgedTimeline
from penstock.core.timing.simulator import rhythm
from penstock.drawing.timeline.excerpt import OPS_PER_RANK, excerpts, simulated_to_draw
from tests.kit.abridged import assert_same_numbers

MANY = 3_000
FAMILIES = (
    "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "hanayo", "chimera", "gpipe",
    "breadth-first",
)  # fmt: skip


@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 1.3, 0.7, hop=0.4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_drawn_is_the_same(family, costs):
    schedule = schedules.build(family, num_ranks=4, num_microbatches=MANY)
    whole, abridged = simulate(schedule, costs), simulated_to_draw(schedule, costs)
    assert isinstance(abridged, AbridgedTimeline)
    num_ops = sum(len(row.ops) for row in abridged.rows)
    assert num_ops < schedule.num_ops / 4
    assert num_ops + abridged.num_left_out == schedule.num_ops
    assert_same_numbers(abridged, whole)
    ends = (excerpts([("", timeline)], OPS_PER_RANK) for timeline in (abridged, whole))
    for (_, ours), (_, theirs) in zip(*ends, strict=True):
        for own, same in zip(ours.rows, theirs.rows, strict=True):
            assert own.ops == same.ops
            assert [*own.starts] == pytest.approx([*same.starts], rel=1e-9)
            assert [*own.ends] == pytest.approx([*same.ends], rel=1e-9)
        for curve, same in zip(ours.in_flight, theirs.in_flight, strict=True):
            assert [held for _, held in curve] == [held for _, held in same]


@pytest.mark.parametrize(("stages", "hop"), [(2, 200.0), (4, 40.0), (7, 25.0)])
def test_a_wait_between_two_stages_of_a_rank_is_not_longer_than_in_the_whole(stages, hop):
    """Of few microbatches it may be: they do not hide the messages that many do."""
    schedule = schedules.build(
        "breadth-first", num_ranks=8, num_microbatches=1_337, stages_per_rank=stages
    )
    costs = Costs(1.0, 1.0, 1.0, hop=hop)
    assert_same_numbers(simulated_to_draw(schedule, costs), simulate(schedule, costs))


def test_without_a_rhythm_every_op_is_simulated(monkeypatch):
    monkeypatch.setattr(rhythm, "_MOST_TURNS", 0)
    schedule = schedules.build("1f1b", num_ranks=4, num_microbatches=MANY)
    assert simulated_to_draw(schedule, Costs()) == simulate(schedule)
