"""The stories of PipeDream's paper come out of its profiles: trends, not its very numbers."""

from functools import cache

import pytest

from benchmarks.planning.stories import HIDDEN, RELEASED, clusters, graph_of, planned, steady

CLUSTERS = clusters()
SERVERS, SLOW, FASTER = CLUSTERS

graph = cache(graph_of)


@pytest.mark.parametrize("name", CLUSTERS)
def test_resnet_wants_data_parallelism_where_exchanges_hide(name):
    assert steady(graph("resnet50"), CLUSTERS[name], HIDDEN) == ((16,), 1.0)


@pytest.mark.parametrize(
    ("model", "name", "judge"),
    [("vgg16", FASTER, RELEASED), ("alexnet", SLOW, RELEASED), ("alexnet", SLOW, HIDDEN)],
)
def test_large_last_layers_want_a_device_of_their_own(model, name, judge):
    speed = steady(graph(model), CLUSTERS[name], judge)
    assert speed.replicas == (15, 1)
    assert speed.speed_up > 1.5


@pytest.mark.parametrize("model", ["vgg16", "alexnet"])
def test_on_servers_most_devices_share_the_first_stage_and_few_have_the_last(model):
    speed = steady(graph(model), CLUSTERS[SERVERS], RELEASED)
    assert max(speed.replicas) == speed.replicas[0] >= 10
    assert speed.replicas[-1] == 1


@pytest.mark.parametrize("name", CLUSTERS)
def test_gnmt_wants_a_pipeline_that_is_all_but_straight(name):
    speed = steady(graph("gnmt_large"), CLUSTERS[name], RELEASED)
    assert speed.replicas.count(1) >= 12
    assert max(speed.replicas) <= 4


def test_who_gains_and_who_does_not():
    gains = {
        model: steady(graph(model), CLUSTERS[SERVERS], RELEASED).speed_up
        for model in ("resnet50", "vgg16", "alexnet", "gnmt_large")
    }
    assert gains.pop("resnet50") < 1.2
    assert min(gains.values()) > 2


@pytest.mark.soak
def test_the_simulated_plan_of_vgg_agrees():
    vgg, speed = planned(graph("vgg16"), CLUSTERS[SERVERS], asynchronous=True)
    assert (vgg.schedule, vgg.replicas) == ("pipedream", (15, 1))
    assert speed.speed_up > 1.3


@pytest.mark.soak
def test_the_simulated_plan_of_resnet_agrees():
    resnet, alone = planned(graph("resnet50"), CLUSTERS[SERVERS], asynchronous=True)
    assert resnet.replicas == (16,)
    assert alone.speed_up == pytest.approx(1.0)
