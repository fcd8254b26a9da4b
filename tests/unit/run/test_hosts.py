"""Ranks that share a host by their plan, and do not."""

import warnings

import pytest

import penstock as pk
from penstock.engine.run.refusals import warn_of_hosts


def plan():
    names = [f"{host}:{index}" for host in "ab" for index in range(2)]
    cluster = pk.Cluster(
        devices=tuple(pk.Device(name=name) for name in names),
        groups=tuple(
            pk.Group(
                name=host,
                members=(f"{host}:0", f"{host}:1"),
                card=pk.Card(bytes_per_second=1e6),
            )
            for host in "ab"
        ),
    )
    layer = pk.Layer(
        name="0",
        forward_seconds=1.0,
        backward_input_seconds=1.0,
        backward_weight_seconds=1.0,
        parameter_bytes=4,
    )
    graph = pk.LayerGraph(layers=(layer,), microbatch_size=1)
    return pk.plan(graph, cluster, microbatches=4, schedule="1f1b", replicas=[4])


def test_it_is_told_with_the_ranks_and_their_hosts():
    with pytest.warns(RuntimeWarning, match=r"ranks 2 and 3 share a host, and they run on y and z"):
        warn_of_hosts(plan(), range(4), ["x 1", "x 1", "y 1", "z 1"])


def test_as_planned_or_nearer_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_hosts(plan(), range(4), ["x 1", "x 1", "y 1", "y 1"])
        warn_of_hosts(plan(), range(4), ["x 1"] * 4)
        warn_of_hosts(plan().edited(hosts=(), cards=()), range(4), ["w", "x", "y", "z"])
