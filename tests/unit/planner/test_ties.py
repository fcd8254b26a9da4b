"""Weights that layers share count once for each stage that has some of these layers."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from penstock import LayerGraph, plan
from penstock.base.errors import PlanError
from penstock.planning.planner.task import Task
from penstock.planning.planner.ties import OF_PARAMETERS
from tests.kit.planning import KIB, chain, devices, graphs, with_tie

HOLDERS = (0, 2, 5)


def shared_by(holders=HOLDERS, **fields):
    given = {"parameter_bytes": 6 * KIB, "gradient_bytes": 12 * KIB, "optimizer_bytes": 24 * KIB}
    return LayerGraph(
        layers=with_tie(chain(6, update_seconds=0.003, **(given | fields)).layers, holders)
    )


def stages_of(graph, cuts):
    found = plan(graph, devices(len(cuts) + 1), microbatches=4, schedule="1f1b", cuts=cuts)
    return found.stages


def test_one_stage_has_what_its_layers_share_once():
    (stage,) = stages_of(shared_by(), [])
    assert (stage.parameter_bytes, stage.summed_bytes) == (4 * 6 * KIB, 4 * 12 * KIB)
    assert (stage.optimizer_bytes, stage.sum_bytes) == (4 * 24 * KIB, 0)
    assert stage.update_seconds == pytest.approx(4 * 0.003)


@pytest.mark.parametrize(("cuts", "counts"), [([3], (2, 3)), ([1, 4], (1, 3, 2)), ([1], (1, 4))])
def test_each_stage_has_it_once_and_room_to_sum_it(cuts, counts):
    stages = stages_of(shared_by(), cuts)
    assert [stage.parameter_bytes for stage in stages] == [count * 6 * KIB for count in counts]
    assert [stage.optimizer_bytes for stage in stages] == [count * 24 * KIB for count in counts]
    assert [stage.sum_bytes for stage in stages] == [6 * KIB] * len(stages)


def test_a_stage_between_the_outermost_holders_is_one_too():
    first, between, last, other = stages_of(shared_by((0, 2, 4)), [1, 3, 5])
    assert first.sum_bytes == between.sum_bytes == last.sum_bytes == 6 * KIB
    assert other.sum_bytes == 0


def test_of_layers_that_have_more_a_share_is_counted():
    mixed = shared_by(parameter_bytes=8 * KIB)
    layers = with_tie(mixed.layers, HOLDERS)
    halves = (replace(own, shared_parameters={"w": 4 * KIB}) for own in layers)
    (stage,) = stages_of(LayerGraph(layers=tuple(halves)), [])
    assert stage.parameter_bytes == 6 * 8 * KIB - 5 * 4 * KIB
    assert stage.optimizer_bytes == 6 * 24 * KIB - 5 * 12 * KIB


@settings(max_examples=50)
@given(graphs(tied=True))
def test_tables_are_what_single_stages_are(graph):
    task = Task(graph, devices(1), 1)
    for start, stop in combinations(range(task.num_layers + 1), 2):
        numbers = task.layers.numbers(start, stop)
        for name in (*OF_PARAMETERS, "tied_bytes"):
            assert task.layers.tables(stop)[name][stop - start - 1, stop] == pytest.approx(
                numbers[name]
            )
            assert numbers[name] >= -1e-9


def test_what_fits_only_if_it_counts_once_is_planned():
    graph = shared_by((0, 5), activation_bytes=0, held_input_bytes=0, weight_kept_bytes=0)
    state = 5 * (6 + 12 + 24) * KIB
    found = plan(graph, devices(1), microbatches=1, memory_bytes=state)
    assert found.rank_bytes == (state,)
    assert sum(found.memory_parts[0]) == state
    with pytest.raises(PlanError, match="no plan fits in memory"):
        plan(graph, devices(1), microbatches=1, memory_bytes=state - 1)
