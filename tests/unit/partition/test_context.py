"""A model whose sequence devices share, as one of them sees it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import penstock as pk
from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Link
from penstock.core.graph import Layer, LayerGraph
from penstock.core.layer_part import LayerPart
from penstock.planning.partition.context import share_positions

LINK = Link(latency_seconds=0.0, bytes_per_second=1e6)
ATTENTION = LayerPart(
    kind="attention", splits={"q": "column", "o": "row"}, pieces=8, key_value_heads=2,
    border_bytes=4_000, output_bytes=4_000,
)  # fmt: skip


def layer(name, parts=()):
    return Layer(
        name=name, kind="block", forward_seconds=1.0, backward_input_seconds=1.0,
        backward_weight_seconds=1.0, update_seconds=0.5, activation_bytes=6_000, output_bytes=4_000,
        parameter_bytes=3_000, optimizer_bytes=6_000, parts=parts,
    )  # fmt: skip


def graph():
    layers = (layer("a"), layer("b", (ATTENTION,)))
    return LayerGraph(layers=layers, input_bytes=100, microbatch_size=4)


def test_everything_but_weights_is_divided():
    split = share_positions(graph(), 2, LINK, num_microbatches=3)
    first, second = split.graph.layers
    assert split.splits == {"a": "context", "b": "context"}
    assert first.forward_seconds == first.backward_weight_seconds == 0.5
    assert (first.activation_bytes, first.output_bytes) == (3_000, 2_000)
    assert (first.parameter_bytes, first.optimizer_bytes) == (3_000, 6_000)
    # The sum of gradients: (t − 1)/t of their bytes, twice.
    assert first.update_seconds == pytest.approx(0.5 + 3_000 / 1e6)
    # Keys and values are a quarter of the width each, and every device has half the positions.
    once = 2 * 4_000 * 2 / 8 / 2 / 1e6
    assert second.forward_seconds == pytest.approx(0.5 + once)
    assert second.backward_input_seconds == pytest.approx(0.5 + 3 * once)


def test_more_devices_send_more_and_compute_less():
    two, four = (share_positions(graph(), size, LINK, num_microbatches=1) for size in (2, 4))
    assert four.seconds < two.seconds
    assert four.moved_bytes > two.moved_bytes


def test_a_plan_has_them():
    plan = pk.plan(graph(), pk.Cluster.local(4), microbatches=4, stages=2, context_ranks=2)
    assert plan.num_seats == 4
    assert [stage.tensor_ranks for stage in plan.stages] == [2, 2]
    assert {how for stage in plan.stages for how in stage.splits.values()} == {"context"}
    assert not any("tensor ranks" in warning for warning in plan.warnings)
    assert plan.with_context_ranks(1).num_seats == 2
    with pytest.raises(PlanError, match="plan without context_ranks"):
        plan.to("torchtitan")


@pytest.mark.parametrize(
    "asked", [{"tensor_ranks": 2}, {"engine": "torchtitan"}, {"reducer": "fully-sharded"}]
)
def test_what_does_not_go_together_is_refused(asked):
    with pytest.raises(InputError, match="context_ranks=2 does not go with"):
        pk.plan(graph(), pk.Cluster.local(4), microbatches=4, context_ranks=2, **asked)


def test_too_few_devices_are_refused():
    with pytest.raises(PlanError, match="the cluster has 2"):
        pk.plan(graph(), pk.Cluster.local(2), microbatches=4, context_ranks=3)


def test_heads_that_do_not_divide_are_no_trouble():
    odd = replace(ATTENTION, pieces=3, key_value_heads=0)
    given = replace(graph(), layers=(layer("a", (odd,)),))
    plan = pk.plan(given, pk.Cluster.local(2), microbatches=4, stages=1, context_ranks=2)
    assert not any("cannot share" in warning for warning in plan.warnings)
