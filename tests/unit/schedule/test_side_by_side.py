"""Pipelines side by side: the family's own order on ranks of their own, in equal shares."""

from __future__ import annotations

import pytest

from penstock import Costs, Schedule, draw, schedules, simulate
from penstock.base.errors import InputError
from penstock.core.schedule import families
from penstock.core.schedule.about import about
from penstock.core.schedule.check import check
from penstock.core.schedule.families.side_by_side import first_pipeline, side_by_side
from penstock.core.schedule.lower import add_communication, add_update
from tests.kit.helpers import make_mlp
from tests.kit.paths import GOLDEN
from tests.kit.reducing import side_by_side as side_by_side_plan

DRAINING = [
    name
    for name in schedules.names()
    if families.has_replicas(name) and name not in {"pipedream", "pipedream-2bw"}
]


def copy_of(schedule, copies, copy):
    """The ops of one pipeline, with its own numbers of microbatches."""
    ranks = schedule.ranks[copy::copies]
    assert all(op.microbatch % copies == copy for ops in ranks for op in ops)
    return Schedule([[op._replace(microbatch=op.microbatch // copies) for op in o] for o in ranks])


@pytest.mark.parametrize("num_microbatches", [8, 12])
@pytest.mark.parametrize("name", DRAINING)
def test_each_copy_performs_the_order_of_the_family_for_its_share(name, num_microbatches):
    alone = schedules.build(name, num_ranks=2, num_microbatches=num_microbatches // 2)
    counts = (2,) * alone.num_stages
    both = schedules.build(name, num_ranks=4, num_microbatches=num_microbatches, replicas=counts)
    assert both.num_ranks == 4 and both.num_microbatches == num_microbatches
    assert [copy_of(both, 2, copy) for copy in range(2)] == [alone, alone]
    assert first_pipeline(both, 2) == alone
    for schedule in (both, add_communication(add_update(both))):
        check(schedule)
    assert simulate(both, Costs()).makespan == simulate(alone, Costs()).makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", range(3, 11))
def test_families_with_unlike_replicas_do_the_same_where_all_are_alike(name, num_microbatches):
    own = schedules.build(name, num_ranks=9, num_microbatches=num_microbatches, replicas="3-3-3")
    shares = [len(range(copy, num_microbatches, 3)) for copy in range(3)]
    assert own == side_by_side(
        [schedules.build(name, num_ranks=3, num_microbatches=share) for share in shares]
    )


@pytest.mark.parametrize("name", sorted({*DRAINING} - {"chimera", "optimal"}))
def test_the_first_copies_have_what_is_left_over(name):
    stages = schedules.build(name, num_ranks=2, num_microbatches=4).num_stages
    uneven = schedules.build(name, num_ranks=4, num_microbatches=9, replicas=(2,) * stages)
    alone = [schedules.build(name, num_ranks=2, num_microbatches=share) for share in (5, 4)]
    assert [copy_of(uneven, 2, copy) for copy in range(2)] == alone
    check(add_communication(add_update(uneven)))


REFUSED = {
    "zb-h1: replicas are 2-1, but its pipelines stand side by side": ("zb-h1", 3, 4, "2-1"),
    "zb-h1: 5 ranks cannot be 2 pipelines": ("zb-h1", 5, 4, "2-2"),
    "zb-v: replicas are given for 2 stages, but 2 ranks of each pipeline have 4": (
        "zb-v", 4, 4, "2-2",
    ),
    "zb-h1: a stage has 2 replicas, but there are only 1 microbatches": ("zb-h1", 4, 1, "2-2"),
    "zb-h1: replicas is '2-x'; give a count": ("zb-h1", 4, 4, "2-x"),
    "partime has no option replicas": ("partime", 4, 4, "2-2"),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_stand_side_by_side(message):
    name, num_ranks, num_microbatches, replicas = REFUSED[message]
    with pytest.raises(InputError, match=message):
        schedules.build(
            name, num_ranks=num_ranks, num_microbatches=num_microbatches, replicas=replicas
        )


def test_the_option_is_described_and_read():
    (option,) = about("zb-h1").options
    assert option.name == "replicas" and "side by side" in option.meaning
    assert families.named("interleaved-1f1b:replicas=2-2-2-2") == (
        "interleaved-1f1b",
        {"replicas": "2-2-2-2"},
    )


def test_a_plan_has_no_more_copies_of_what_has_two():
    with pytest.raises(InputError, match="chimera has every stage twice by itself"):
        side_by_side_plan(make_mlp(), "chimera", 2, 2, 8)


def test_golden_drawing(tmp_path):
    """If a change of the picture is meant, write it anew: ``draw(timeline, path)``."""
    golden = GOLDEN / "drawing_interleaved_2x2.txt"
    both = schedules.build("interleaved-1f1b", num_ranks=4, num_microbatches=4, replicas="2-2-2-2")
    draw(simulate(both, Costs()), tmp_path / golden.name)
    assert (tmp_path / golden.name).read_bytes() == golden.read_bytes()
