"""Which plans let copies of a stage gather its weights together."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from penstock.errors import InputError

import penstock as pk
from penstock.core.schedule import Schedule, families
from penstock.planning.plans.lockstep import check_lockstep
from tests.kit.helpers import make_mlp, make_plan
from tests.kit.reducing import replicated


@pytest.mark.parametrize("family", ["gpipe", "1f1b"])
@pytest.mark.parametrize("replicas", [(2,), (2, 2), (2, 1), (1, 3), (3, 1), (2, 4), (3, 2)])
def test_copies_of_equal_work_go_in_lockstep(family, replicas):
    schedule = families.build(
        family, num_ranks=sum(replicas), num_microbatches=12, replicas=list(replicas)
    )
    check_lockstep(schedule)


def test_both_directions_of_chimera_do_the_same_at_once():
    check_lockstep(families.build("chimera", num_ranks=4, num_microbatches=8))


def test_copies_with_more_microbatches_than_others_do_not():
    plan = replicated(make_mlp(), (2, 1), 5)
    with pytest.raises(InputError, match=r"ranks 0 and 1 have copies of stage 0 .*'step'"):
        plan.with_reducer("fully-sharded", gathered_for="use")
    assert plan.with_reducer("fully-sharded").summing.gathered_for == "step"


def test_what_would_wait_in_a_circle_is_refused():
    copies = "0F0,0B0,0F1,0B1\n0F2,0B2,0F3,0B3\n"
    check_lockstep(Schedule.parse(copies + "1F0,1F2,1B0,1B2,1F1,1F3,1B1,1B3"))
    # Copy 1 goes back from microbatch 2 when copy 0 does from 0: before anybody has run 1.
    with pytest.raises(InputError, match="ranks 0, 1, 2 would wait for each other"):
        check_lockstep(Schedule.parse(copies + "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"))


def test_slices_are_gathered_for_a_step_only():
    schedule = families.build("seq1f1b", num_ranks=2, num_microbatches=4)
    with pytest.raises(InputError, match="cuts sequences into slices"):
        check_lockstep(schedule)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reducer": "owners", "gathered_for": "use"}, "is for the reducer 'fully-sharded'"),
        ({"gathered_for": "ever"}, "gathered_for"),
    ],
)
def test_what_does_not_go_with_rows_of_weights_is_refused(change, words):
    plan = replicated(make_mlp(), (2, 1)).with_reducer("fully-sharded")
    with pytest.raises(InputError, match=words):
        replace(plan.summing, **change)


def test_pipelines_that_never_flush_and_tensor_ranks_are_refused():
    plan = make_plan(make_mlp(), 2, 4, "pipedream")
    with pytest.raises(InputError, match="'fully-sharded' needs a flush"):
        plan.with_reducer("fully-sharded")
    wide = make_plan(make_mlp(), 2, 4)
    wide = replace(wide, stages=tuple(replace(stage, tensor_ranks=2) for stage in wide.stages))
    with pytest.raises(InputError, match="gathers whole layers"):
        wide.with_reducer("fully-sharded")


def test_hosts_that_have_all_weights_each_have_as_many_copies():
    plan = replicated(make_mlp(), (3,)).with_reducer("fully-sharded")
    with pytest.raises(InputError, match=r"in groups of 2 and 1, .* leave levels out"):
        plan.edited(summing=replace(plan.summing, levels=((0, 0, 1),)))
    wide = replicated(make_mlp(), (4,)).with_reducer("fully-sharded")
    hybrid = wide.edited(summing=replace(wide.summing, levels=((0, 1, 0, 1),)))
    assert hybrid.summing.shard_groups(range(4)) == ((0, 2), (1, 3))
    assert wide.summing.shard_groups(range(4)) == ((0, 1, 2, 3),)


def test_levels_are_left_out_and_the_choice_is_written_down(tmp_path):
    plan = replicated(make_mlp(), (2, 2))
    near = replace(plan, summing=replace(plan.summing, levels=((0, 0, 1, 1),)))
    sharded = near.with_reducer("fully-sharded", gathered_for="use")
    assert sharded.summing.levels == ()
    sharded.save(tmp_path / "plan.json")
    assert pk.Plan.load(tmp_path / "plan.json") == sharded
