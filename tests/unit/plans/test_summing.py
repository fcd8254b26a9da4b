"""How a plan says who sums gradients."""

from __future__ import annotations

import pytest

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
