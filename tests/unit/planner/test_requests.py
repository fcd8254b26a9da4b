"""What can be asked of the planner: schedules with options, replicas, and how much of it all."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock import Card, Cluster, Group, SpareMachine, Tier, plan, schedules, versions
from penstock.base.errors import InputError, PlanError
from penstock.planning.planner.request import PlanRequest
from tests.kit.command_line import refused
from tests.kit.planning import chain, devices


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("spilled:group=1", {"group": 1}),
        ("interleaved-1f1b:stages_per_rank=4", {"stages_per_rank": 4}),
        ("seq1f1b:num_slices=2", {"num_slices": 2}),
        ("zb-auto:activation_limit=2", {"activation_limit": 2.0}),
    ],
)
def test_a_schedule_may_bring_its_options(schedule, options):
    """They were refused here, and taken where schedules are drawn."""
    planned = plan(chain(8), devices(2), microbatches=4, schedule=schedule)
    assert planned.schedule == schedule.partition(":")[0]
    assert planned.options.items() >= options.items()
    assert planned.build_schedule().num_microbatches == 4


def test_stages_that_come_and_go_take_options_too():
    cluster = replace(Cluster.local(1), tiers=(Tier(kind="host"),))
    request = {"microbatches": 4, "spill": "always"}
    planned = plan(chain(8), cluster, schedule="spilled:group=1,stages_per_rank=2", **request)
    assert planned.options == {"group": 1, "stages_per_rank": 2}
    assert planned.spill is not None


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("spilled:grup=1", "spilled has no option grup; it takes stages_per_rank, group"),
        ("spilled:group=x", "spilled: group cannot be 'x'"),
        ("spiled:group=1", "no schedule is called 'spiled'; did you mean 'spilled'"),
        ("1f1b:replicas=2-1", r"1f1b: leave replicas out; give replicas="),
        ("pipedream-2bw:minibatch=4", "leave minibatch out; it follows from"),
    ],
)
def test_options_that_a_plan_cannot_have(schedule, message):
    with pytest.raises(InputError, match=message):
        plan(chain(8), devices(4), microbatches=4, schedule=schedule)


def test_one_replica_of_each_stage_goes_with_every_schedule():
    """ "zb-h1 has no option replicas" was said of [1, 1], which asks for two stages."""
    planned = plan(chain(), devices(4), microbatches=8, schedule="zb-h1", replicas=[1, 1])
    assert planned == plan(chain(), devices(4), microbatches=8, schedule="zb-h1", stages=2)
    with pytest.raises(InputError, match="zb-h1: replicas are 2-1, but its pipelines stand"):
        plan(chain(), devices(4), microbatches=8, schedule="zb-h1", replicas="2-1")
    with pytest.raises(InputError, match="replicas are given for 2 stages, but stages is 3"):
        plan(chain(), devices(4), microbatches=8, schedule="zb-h1", replicas="1-1", stages=3)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_schedule_that_holds_stages_twice_is_refused_for_that(count):
    """ "num_ranks is 1; take 2" was said, of two devices as well as of four."""
    with pytest.raises(PlanError, match="chimera keeps 2 copies of each stage; a plan gives"):
        plan(chain(), devices(count), microbatches=8, schedule="chimera")


@pytest.mark.parametrize("name", [name for name in schedules.names() if name != "chimera"])
def test_all_other_schedules_can_be_planned(name):
    assert plan(chain(8), devices(2), microbatches=4, schedule=name).schedule == name


@pytest.mark.parametrize("schedule", ["gpipe", "breadth-first", "pipedream-2bw", "zb-auto"])
def test_more_microbatches_than_can_be_simulated_are_refused_at_once(schedule):
    message = "1,000,000 microbatches on 4 ranks are too many .* may be 100,000 at most, and ranks"
    with pytest.raises(InputError, match=message):
        plan(chain(4), devices(4), microbatches=1_000_000, schedule=schedule)
    with pytest.raises(InputError, match="on 1 rank are too many"):
        plan(chain(4), devices(1), microbatches=1_000_000, schedule=schedule)


def test_behind_network_cards_as_many_as_can_be_simulated_are_planned():
    card = Group(name="host", members=("d0", "d1"), card=Card(bytes_per_second=1e9))
    cluster = replace(devices(2), groups=(card,))
    with pytest.raises(
        InputError, match="every op on hosts with network cards may have to be simulated"
    ):
        plan(chain(2), cluster, microbatches=1_000_000)


def test_more_microbatches_than_anybody_has_are_refused():
    with pytest.raises(InputError, match="20,000,000 microbatches on 2 ranks are too many to plan"):
        plan(chain(2), devices(2), microbatches=20_000_000)


def test_of_the_sizes_that_make_too_many_microbatches_none_is_tried():
    single = replace(chain(), microbatch_size=1)
    graph = replace(chain(), microbatch_size=1000, other_sizes=(single,))
    many, few = PlanRequest(minibatch=20_000_000), PlanRequest(minibatch=1000)
    assert many.microbatch_sizes(graph, num_ranks=2) == [(1000, 20_000)]
    whole = PlanRequest(minibatch=1_000_000, schedule="gpipe")
    assert whole.microbatch_sizes(graph, num_ranks=2) == [(1000, 1000)]
    assert few.microbatch_sizes(graph, num_ranks=2) == [(1, 1000), (1000, 1)]


@pytest.mark.parametrize("reducer", ["sharded", "parameter-server"])
@pytest.mark.parametrize(
    "never", [{"asynchronous": True}, {"schedule": "pipedream"}, {"versions": versions.Stash()}]
)
def test_what_waits_for_a_drained_pipeline_is_refused_where_none_drains(reducer, never):
    """It was dropped without a word where an asynchronous plan won."""
    cluster = replace(devices(4), spares=(SpareMachine(name="s", bytes_per_second=1e9),))
    with pytest.raises(
        InputError, match=f"reducer='{reducer}' updates .* never does; take another"
    ):
        plan(chain(8), cluster, microbatches=8, reducer=reducer, **never)


def test_without_microbatches_the_command_line_says_what_python_says(tmp_path):
    chain(4).save(tmp_path / "g.json")
    with pytest.raises(InputError, match="say how large a minibatch is") as error:
        plan(chain(4), Cluster.local(2))
    assert str(error.value) in refused("plan", str(tmp_path / "g.json"), "-p", "2")
