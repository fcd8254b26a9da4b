"""What comes from tiers and goes there is told by predicted and measured timelines, and drawn."""

from __future__ import annotations

import itertools

import pytest
import torch

import penstock as pk
from penstock.core.schedule.lower import add_update
from penstock.core.schedule.residence import add_residence
from penstock.core.timing.spans import ALL_OF_STAGE
from penstock.drawing import draw
from penstock.drawing.timeline.link_rows import link_rows
from tests.kit.spilling import make_net, spilled_pipeline

COSTS = pk.Costs(fetch=1, fetch_state=2, leave=1, leave_state=2, update=0.5)


def predicted(num_ranks=1):
    order = pk.schedules.build(
        "spilled", num_ranks=num_ranks, num_microbatches=2, stages_per_rank=3
    )
    return pk.simulate(add_residence(add_update(order)), COSTS)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reader_and_a_writer_do_one_thing_after_another(num_ranks):
    timeline = predicted(num_ranks)
    for kind in ("read", "write"):
        for rank in range(num_ranks):
            own = [one for one in timeline.transfers if one[:2] == ((rank,), kind)]
            own.sort(key=lambda one: one.start)
            assert own and all(one.number == ALL_OF_STAGE for one in own)
            assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    # Read 2P + S − P₀ − Pₗ, write P + S; a rank's ends keep theirs.
    lasted = {
        kind: sum(one.end - one.start for one in timeline.transfers if one.kind == kind)
        for kind in ("read", "write")
    }
    if num_ranks == 1:
        assert lasted == {"read": 2 * 3 + 3 * 2 - 1 - 1, "write": 3 + 3 * 2}


def test_no_compute_begins_before_its_stage_has_come():
    timeline = predicted()
    spans = [span for span in timeline.spans if span.op.kind is pk.Kind.FORWARD]
    for span in spans:
        came = [
            one.end
            for one in timeline.transfers
            if one.kind == "read" and one.stage == span.op.stage and one.start < span.start
        ]
        assert not came or came[0] <= span.start


def test_a_measured_timeline_has_the_lanes_too_and_survives_its_file(tmp_path):
    with spilled_pipeline(make_net()) as pipeline:
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(8, 16, generator=generator)
            pipeline.step(inputs, torch.randint(0, 4, (8,), generator=generator))
        timeline = pipeline.timeline
    kinds = {one.kind for one in timeline.transfers}
    assert kinds == {"read", "write"}
    assert [row.name for row in link_rows(timeline)] == ["0 reads", "0 writes"]
    assert all(0 <= one.start <= one.end for one in timeline.transfers)
    assert pk.Timeline.from_json(timeline.to_json()) == timeline


def test_lanes_are_rows_of_drawings(tmp_path):
    timeline = predicted()
    text = draw(timeline)
    assert "0reads" in text and "0writes" in text and "r1" in text
    picture = draw(timeline, tmp_path / "lanes.svg")
    assert "coming from a tier" in picture and "going to a tier" in picture
    assert "stage 1 comes, rank 0 reads" in picture
