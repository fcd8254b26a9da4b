"""How a plan says who sums gradients."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import penstock as pk
from penstock.base.errors import FileError, InputError
from penstock.core.cluster import SpareMachine
from penstock.planning.plans import Plan
from penstock.planning.plans.summing import REDUCERS, Summing
from tests.kit.helpers import make_mlp
from tests.kit.reducing import replicated

SPARE = SpareMachine(name="spare", bytes_per_second=1e9, address="10.0.0.7:5600")


def test_a_plan_says_so_in_its_file():
    plan = replicated(make_mlp(), (3,))
    assert plan.summing.reducer == "owners"
    served = plan.with_reducer("servers", [SPARE])
    assert Plan.from_json(served.to_json()) == served
    assert served.summing.servers[0].where == "10.0.0.7:5600"
    assert served.with_reducer("owners") == plan


@pytest.mark.parametrize("name", REDUCERS)
def test_every_reducer_can_be_asked_for(name):
    assert replicated(make_mlp(), (2,)).with_reducer(name).summing.reducer == name


def test_what_cannot_be_is_refused():
    plan = replicated(make_mlp(), (3,))
    with pytest.raises(InputError, match=r"reducer.*'ring'"):
        plan.with_reducer("ring")
    with pytest.raises(InputError, match="'owners' uses no servers"):
        plan.with_reducer("owners", [SPARE])
    with pytest.raises(InputError, match=r"'10\.0\.0\.7:5600' is the address of two"):
        plan.with_reducer("servers", [SPARE, SPARE])
    with pytest.raises(FileError, match="2 numbers for 3 ranks"):
        Plan.from_json(
            plan.to_json().replace('"bytes_per_second": []', '"bytes_per_second": [1.0, 1.0]')
        )
    with pytest.raises(InputError, match="must be > 0"):
        Summing(bytes_per_second=(1.0, -1.0))


def test_a_cluster_file_says_where_servers_are():
    text = '[[servers]]\ncount = 2\n[[spares]]\nbandwidth = "1Gbit/s"\n'
    assert pk.Cluster.from_toml(text).spares[0].where == "spare"
    placed = pk.Cluster.from_toml(text + 'address = "10.0.0.7:99"\n')
    assert placed.spares[0].where == "10.0.0.7:99"
    with pytest.raises(FileError, match="2 spare machines cannot have the address"):
        pk.Cluster.from_toml(text + 'address = "10.0.0.7:99"\ncount = 2\n')


def near(replicas, *levels, count=6):
    plan = replicated(make_mlp(), replicas, count)
    return plan.edited(summing=replace(plan.summing, levels=levels))


def test_a_plan_says_which_ranks_sum_among_themselves_first():
    plan = near((4,), (0, 0, 1, 1))
    assert "sums inside hosts first: ranks 0–1, 2–3" in " ".join(plan.text().split())
    assert Plan.from_json(plan.to_json()) == plan
    assert "sums inside" not in near((4,), (0, 1, 2, 3)).text()
    behind = near((6,), (0, 1, 0, 1, 2, 2), (0, 0, 0, 0, 1, 1))
    assert "ranks 0+2, 1+3, 4–5; then ranks 0–3, 4–5" in " ".join(behind.text(200).split())
    many = near((10,), tuple(rank // 2 for rank in range(10)), count=10)
    assert "6–7, …" in many.text(200)


def test_levels_stay_with_a_reducer_unless_updates_are_stale():
    plan = near((4,), (0, 0, 1, 1))
    assert plan.with_reducer("sharded").summing.levels == ((0, 0, 1, 1),)
    assert plan.with_reducer("parameter-server", stale=2).summing.levels == ()


def test_levels_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="levels give the groups of 2 ranks, and there are 4"):
        near((4,), (0, 1))
    with pytest.raises(InputError, match="levels: rank 2 is in group 1, but another rank"):
        near((3,), (0, 1, 1), (0, 0, 1))
    with pytest.raises(InputError, match="stale updates are made of each copy's own gradients"):
        Summing(reducer="parameter-server", stale=1, levels=((0, 0),))
    text = near((3,), (0, 0, 1)).to_json()
    with pytest.raises(FileError, match="unknown field `nearness`"):
        Plan.from_json(text.replace('"levels"', '"nearness"'))


PLACES = {"hosts": (0, 0, 1, 1), "cards": (0, 0, 1, 1)}


@pytest.mark.parametrize(
    "levels", [((0, 0, 1, 1),), ((0, 1, 2, 2),), ((0, 1, 2, 2), (0, 0, 1, 1)), ((0, 0, 0, 0),)]
)
def test_what_sums_first_is_a_part_of_a_host_or_whole_hosts(levels):
    plan = replicated(make_mlp(), (4,), 6).edited(**PLACES)
    assert plan.edited(summing=replace(plan.summing, levels=levels)).summing.levels == levels


@pytest.mark.parametrize("levels", [((0, 1, 1, 2),), ((0, 1, 0, 1),), ((0, 0, 0, 1),)])
def test_levels_that_contradict_hosts_are_refused(levels):
    plan = replicated(make_mlp(), (4,), 6).edited(**PLACES)
    with pytest.raises(InputError, match=r"levels: group \d has ranks of hosts 0, 1, and not all"):
        plan.edited(summing=replace(plan.summing, levels=levels))


def test_levels_without_end_are_refused():
    with pytest.raises(InputError, match="the number of levels is 33, but may be 32 at most"):
        near((4,), *[(0, 1, 2, 3)] * 33)


def test_an_edited_sum_says_that_times_are_those_of_another():
    plan = replicated(make_mlp(), (4,), 6)
    edited = near((4,), (0, 0, 1, 1))
    assert edited.warnings == (
        "how copies sum their gradients was edited: predicted times are those of the sums before",
    )
    assert edited.warnings[0] in " ".join(edited.text(200).split())
    again = edited.edited(summing=replace(edited.summing, levels=()))
    assert again.warnings == edited.warnings
    assert plan.edited(summing=plan.summing) == plan
    alone = replicated(make_mlp(), (1, 1), 6)
    assert not alone.edited(summing=replace(alone.summing, levels=((0, 0),))).warnings
