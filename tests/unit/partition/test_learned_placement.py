"""Placers of branching graphs: only pipelines, equal budgets, the optimum where it is known."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from benchmarks.planning.learned_placement import (
    chain,
    inception,
    prefix_cuts,
    series_parallel,
    two_towers,
)
from benchmarks.planning.placers import brute_force_placement, random_placement
from penstock import schedules, simulate
from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Link
from penstock.core.graph import Layer, LayerGraph
from penstock.planning.partition import balance
from penstock.planning.partition.placement import (
    _DevicePolicy,
    greedy_placement,
    learned_placement,
    make_space,
    stage_costs,
)
from tests.kit.paths import DOCS

PLACERS = [random_placement, greedy_placement, learned_placement]
EVERY_LAYER = {"max_groups": 1000, "tiny": 0.0}


def layer(name, inputs, seconds=1.0, output_bytes=1, **more):
    return Layer(
        name=name,
        forward_seconds=seconds,
        backward_input_seconds=seconds,
        backward_weight_seconds=seconds,
        output_bytes=output_bytes,
        inputs=inputs,
        **more,
    )


def graph_of(*layers):
    return LayerGraph(layers=layers)


FOUR = graph_of(
    layer("a", (), 3), layer("b", ("a",), 1), layer("c", ("a",), 2), layer("d", ("b", "c"), 2)
)
"""Of the two-stage cuts of b, c in either order, only a+b | c+d is even."""

CROSSED = graph_of(
    layer("a", (), 3), layer("b", (), 2), layer("c", ("a",), 4), layer("d", ("b",), 5)
)
"""The even pipeline is a+c | b+d, which no cut of the execution order gives."""


def beat(graph):
    times = {one.name: one.compute_seconds for one in graph.layers}
    return lambda stages: max(sum(times[name] for name in names) for names in stages)


def reads_forward_only(graph, stages):
    home = {name: at for at, names in enumerate(stages) for name in names}
    assert sorted(home) == sorted(one.name for one in graph.layers)
    for before, one in zip((None, *graph.layers), graph.layers, strict=False):
        implicit = () if before is None else (before.name,)
        for source in implicit if one.inputs is None else one.inputs:
            assert home[source] <= home[one.name]
        for reader in one.skip_bytes:
            assert home[one.name] <= home[reader]


class Counting:
    """A score that checks what it is asked, and counts."""

    def __init__(self, graph, score):
        self.graph, self.score, self.asked = graph, score, []

    def __call__(self, stages):
        reads_forward_only(self.graph, stages)
        assert all(stages)
        self.asked.append(stages)
        return self.score(stages)


@pytest.mark.parametrize("place", PLACERS)
@pytest.mark.parametrize("seed", range(4))
def test_only_pipelines_are_scored_and_budgets_are_kept(place, seed):
    graph = series_parallel(seed, 14)
    score = Counting(graph, beat(graph))
    found = place(graph, 3, score, num_samples=60, seed=seed, **EVERY_LAYER)
    assert len(score.asked) == len(found.history) <= 60
    assert len(set(score.asked)) == len(score.asked)
    assert 1 <= len(found.stages) <= 3
    assert found.seconds == min(map(score.score, score.asked)) == score.score(found.stages)
    assert list(found.history) == sorted(found.history, reverse=True)
    assert found.history[-1] == found.seconds
    assert found.num_draws >= len(found.history) + found.num_invalid


def test_the_policy_draws_what_is_no_pipeline_and_is_not_scored_for_it():
    graph = two_towers(1, 8)
    score = Counting(graph, beat(graph))
    found = learned_placement(graph, 4, score, num_samples=100, seed=1, **EVERY_LAYER)
    assert found.num_invalid > 0
    assert len(score.asked) == 100


@pytest.mark.parametrize("place", PLACERS)
def test_the_same_seed_gives_the_same_placement(place):
    graph = inception(1, 1, (1, 2, 3))
    runs = [place(graph, 3, beat(graph), num_samples=40, seed=7) for _ in range(2)]
    assert runs[0] == runs[1]
    others = {place(graph, 3, beat(graph), num_samples=40, seed=s).history for s in range(4)}
    assert len(others) > 1


@pytest.mark.parametrize("place", PLACERS)
@pytest.mark.parametrize(
    ("graph", "stages", "seconds"),
    [(FOUR, (("a", "b"), ("c", "d")), 12), (CROSSED, (("a", "c"), ("b", "d")), 21)],
)
def test_four_groups_on_two_devices_find_the_optimum(place, graph, stages, seconds):
    exact = brute_force_placement(graph, 2, beat(graph), tiny=0.0)
    assert exact.seconds == seconds
    found = place(graph, 2, beat(graph), num_samples=30, seed=3, tiny=0.0)
    assert found.seconds == exact.seconds
    assert found.stages in (stages, stages[::-1])


def test_no_cut_of_the_execution_order_is_as_good_where_branches_cross():
    assert beat(CROSSED)(prefix_cuts(CROSSED, 2)) == 27
    # The two towers are listed in turns; one on each device is even, and no data comes back.
    assert make_space(CROSSED, 2, tiny=0.0).order_of((0, 1, 0, 1)) == (0, 1)
    # With one half of each tower per device, both would wait for the other.
    assert make_space(CROSSED, 2, tiny=0.0).order_of((0, 1, 1, 0)) is None


@pytest.mark.parametrize("place", PLACERS)
@pytest.mark.parametrize("seed", range(3))
def test_on_a_chain_nobody_beats_the_exact_programme(place, seed):
    graph = chain(seed, 9)
    cuts = balance([one.compute_seconds for one in graph.layers], 3)
    names = [one.name for one in graph.layers]
    exact = tuple(tuple(names[a:b]) for a, b in pairwise(cuts))
    best = beat(graph)(exact)
    assert brute_force_placement(graph, 3, beat(graph), tiny=0.0).seconds == pytest.approx(best)
    found = place(graph, 3, beat(graph), num_samples=40, seed=seed, tiny=0.0)
    assert found.seconds >= best * (1 - 1e-12)


def chance_of_wanted(learns):
    """The mean chance of a wanted device after 400 batches whose rewards count wrong devices."""
    policy = _DevicePolicy.of(make_space(series_parallel(2, 12), 3, **EVERY_LAYER), seed=5)
    wanted = [at % 3 for at in range(12)]
    for _ in range(400):
        drawn = policy.draw()
        wrong = [sum(a != b for a, b in zip(row, wanted, strict=True)) for row in drawn.tolist()]
        policy.learn(drawn, [-float(count) if learns else -1.0 for count in wrong])
    return policy.chances[range(12), wanted].mean()


def test_the_policy_learns_from_rewards_and_from_nothing_else():
    assert chance_of_wanted(learns=True) > 0.55
    assert chance_of_wanted(learns=False) < 0.4


def test_brute_force_sees_every_labelling_once_and_knows_its_limit():
    # Two layers without an edge on two devices: together, or apart in either order.
    graph = graph_of(layer("a", ()), layer("b", ()))
    score = Counting(graph, beat(graph))
    brute_force_placement(graph, 2, score, tiny=0.0)
    assert sorted(score.asked) == [(("a",), ("b",)), (("a", "b"),), (("b",), ("a",))]
    with pytest.raises(PlanError, match="more than 2 placements"):
        brute_force_placement(graph, 2, score, tiny=0.0, limit=2)


@pytest.mark.parametrize("seed", range(6))
def test_groups_stay_a_graph_without_cycles(seed):
    draw = random.Random(seed)
    graph = series_parallel(seed, 40)
    space = make_space(graph, 3, max_groups=draw.randint(3, 12))
    assert 3 <= len(space.groups) <= 12
    assert sorted(at for group in space.groups for at in group) == list(range(40))
    assert all(source < reader for source, reader in space.edges)
    assert space.order_of(range(len(space.groups))) == tuple(range(len(space.groups)))


def test_tiny_layers_join_a_neighbour():
    graph = graph_of(
        layer("a", ()), layer("relu", ("a",), 0.001), layer("b", ("relu",)), layer("c", ("b",))
    )
    space = make_space(graph, 2)
    assert space.groups in (((0, 1), (2,), (3,)), ((0,), (1, 2), (3,)))


def test_costs_of_stages_that_are_no_consecutive_layers():
    graph = graph_of(
        layer("a", (), 1, output_bytes=10, skip_bytes={"d": 7}),
        layer("b", (), 2, output_bytes=20),
        layer("c", ("a",), 3, output_bytes=40),
        layer("d", ("b", "c"), 4),
    )
    costs = stage_costs(graph, (("a", "c"), ("b", "d")), Link(bytes_per_second=1.0))
    assert costs.forward == costs.backward_input == (4, 6)
    assert costs.hop == (40 + 7,)
    three = stage_costs(graph, (("b",), ("a", "c"), ("d",)), Link(bytes_per_second=1.0))
    assert three.hop == (20, 20 + 40 + 7)
    order = schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    # Two microbatches on the second stage, a hop there and one back, and the first stage's ends.
    assert simulate(order, costs).makespan == 4 + 47 + 2 * (6 + 12) + 47 + 8


def test_an_output_travels_to_the_last_stage_that_reads_it_in_whatever_order():
    graph = graph_of(
        layer("a", (), output_bytes=10),
        layer("far", ("a",), output_bytes=0),
        layer("near", ("a",), output_bytes=0),
    )
    costs = stage_costs(graph, (("a",), ("near",), ("far",)), Link(bytes_per_second=1.0))
    assert costs.hop == (10, 10)


def test_costs_on_consecutive_stages_are_the_graphs_crossing_bytes():
    graph = series_parallel(3, 12)
    stages = prefix_cuts(graph, 4)
    ends = [sum(map(len, stages[: at + 1])) for at in range(3)]
    costs = stage_costs(graph, stages, Link(bytes_per_second=1.0))
    assert costs.hop == tuple(graph.crossing_bytes[end - 1] for end in ends)


def test_costs_refuse_what_is_no_pipeline():
    with pytest.raises(InputError, match="reads 'a' of the later stage 1"):
        stage_costs(FOUR, (("b", "c", "d"), ("a",)))
    with pytest.raises(InputError, match="exactly once"):
        stage_costs(FOUR, (("a", "b"), ("c",)))


def test_the_code_in_the_docs_runs():
    page = DOCS / "learned-placement.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    namespace = {"graph": two_towers(1, 4), "link": Link(bytes_per_second=60.0)}
    exec(code, namespace)
    reads_forward_only(namespace["graph"], namespace["found"].stages)


@pytest.mark.parametrize("place", PLACERS)
def test_nonsense_is_refused(place):
    with pytest.raises(PlanError, match="4 layers cannot fill 5 devices"):
        place(FOUR, 5, beat(FOUR))
    with pytest.raises(InputError, match="num_samples is 0"):
        place(FOUR, 2, beat(FOUR), num_samples=0)
    with pytest.raises(InputError, match="num_devices 0"):
        place(FOUR, 0, beat(FOUR))
    with pytest.raises(InputError, match="max_groups 1"):
        place(FOUR, 2, beat(FOUR), max_groups=1)
