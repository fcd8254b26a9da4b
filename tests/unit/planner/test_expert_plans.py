"""Plans whose copies divide experts: what is asked, what it costs, and what is refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from penstock.errors import InputError, PlanError

import penstock as pk
from penstock.core.expert_part import ExpertPart
from penstock.core.graph import Layer, LayerGraph
from penstock.planning.plans import Plan

MEGA = 1_000_000
LINK = pk.Link(bytes_per_second=1e9, latency_seconds=1e-4)


def mixture_graph(loads=(), token_bytes=MEGA, fewer=()) -> LayerGraph:
    """Four layers, every other one a mixture of eight experts."""
    experts = ExpertPart(
        name="experts",
        num_experts=8,
        parameter_bytes=80 * MEGA,
        token_bytes=token_bytes,
        share=0.5,
        fewer=fewer,
        loads=loads,
    )
    layers = []
    for number in range(4):
        has_experts = number % 2 == 1
        size = 100 * MEGA if has_experts else 20 * MEGA
        layers.append(
            Layer(
                name=f"{number}",
                forward_seconds=0.1,
                backward_input_seconds=0.1,
                backward_weight_seconds=0.1,
                parameter_bytes=size,
                optimizer_bytes=2 * size,
                output_bytes=MEGA,
                experts=(replace(experts, name=f"{number}.experts"),) if has_experts else (),
            )
        )
    return LayerGraph(layers=tuple(layers), microbatch_size=2)


def cluster(count=4) -> pk.Cluster:
    return pk.Cluster(devices=tuple(pk.Device(name=f"d{k}") for k in range(count)), link=LINK)


def planned(graph=None, *, size=2, count=4, **options) -> Plan:
    options = {"microbatches": 8, "replicas": "2-2", **options}
    return pk.plan(graph or mixture_graph(), cluster(count), expert_ranks=size, **options)


def test_each_copy_has_its_share_of_the_experts_and_all_else_whole():
    whole, divided = planned(size=1), planned()
    for before, after in zip(whole.stages, divided.stages, strict=True):
        assert before.layers == after.layers and after.expert_ranks == 2
        assert after.parameter_bytes == before.parameter_bytes - 40 * MEGA
        assert after.optimizer_bytes == pytest.approx(2 * after.parameter_bytes, abs=2)
        assert after.reduce_seconds < before.reduce_seconds
    assert max(divided.rank_bytes) < max(whole.rank_bytes)
    assert divided.model == whole.model and Plan.from_json(divided.to_json()) == divided
    assert "experts over 2 copies" in str(divided)


def test_tokens_travel_twice_forward_and_twice_back():
    whole, divided = planned(size=1), planned()
    # Half of the tokens go to the other copy, and the numbers of tokens before them.
    trip = 2 * LINK.seconds(MEGA / 2) + LINK.seconds(8 * 8)
    for before, after in zip(whole.stages, divided.stages, strict=True):
        assert after.forward_seconds == pytest.approx(before.forward_seconds + trip)
        assert after.backward_input_seconds == pytest.approx(before.backward_input_seconds + trip)
        assert after.backward_weight_seconds == pytest.approx(before.backward_weight_seconds)
        assert after.collective_seconds == pytest.approx(2 * trip)


def test_all_wait_for_the_copy_that_gets_most_tokens():
    loads = (0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05, 0.0)
    even = planned(mixture_graph(token_bytes=0))
    uneven = planned(mixture_graph(loads, token_bytes=0))
    # Half of a mixture's time is its experts', who take 1.6 times as long on the busiest copy.
    more = 0.5 * (2 * 0.8 - 1)
    for before, after in zip(even.stages, uneven.stages, strict=True):
        assert before.expert_loads == (0.5, 0.5) and after.expert_loads == (0.8, 0.2)
        assert after.forward_seconds - before.forward_seconds == pytest.approx(more * 0.1)
        assert after.backward_weight_seconds - before.backward_weight_seconds == pytest.approx(
            more * 0.1
        )
    assert uneven.step_seconds > even.step_seconds
    assert "the busiest gets 1.60 × its share of tokens" in " ".join(str(uneven).split())


def test_one_device_beside_it_has_all_experts():
    whole, divided = planned(size=1), planned()
    assert divided.one_device_seconds == whole.one_device_seconds


def test_the_planner_gives_all_stages_as_many_copies():
    plan = planned(replicas=None)
    assert {stage.expert_ranks for stage in plan.stages} == {2}
    assert len({*plan.replicas}) == 1 and plan.replicas[0] % 2 == 0
    several = planned(size=2, count=8, replicas="4-4")
    assert several.replicas == (4, 4)


def test_more_memory_on_one_copy_than_a_device_has_needs_expert_ranks():
    graph = mixture_graph()
    options = {"replicas": (4,), "memory_bytes": 700 * MEGA, "recompute": "never"}
    with pytest.raises(PlanError):
        planned(graph, size=1, spill="never", **options)
    assert planned(graph, size=4, spill="never", **options).replicas == (4,)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"size": 3}, InputError, "it has 8 experts"),
        ({"replicas": "1-3"}, PlanError, "as many replicas, a multiple of 2"),
        ({"microbatches": 7}, PlanError, "do not have as many of 7 microbatches"),
        ({"count": 1, "replicas": None}, PlanError, "a multiple of 2"),
        ({"tensor_ranks": 2}, InputError, "does not go with tensor_ranks"),
        ({"reducer": "fully-sharded"}, InputError, "does not go with reducer='fully-sharded'"),
        ({"asynchronous": True}, InputError, "does not go with asynchronous"),
        ({"schedule": "pipedream"}, InputError, "does not go with asynchronous"),
        ({"spill": "always", "replicas": None}, InputError, "does not go with spill='always'"),
        ({"size": 0}, InputError, "expert_ranks is 0"),
        ({"size": True}, InputError, "expert_ranks is True"),
    ],
)
def test_what_does_not_go_together_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        planned(**options)


def test_a_model_without_experts_has_none_to_divide():
    layers = tuple(replace(layer, experts=()) for layer in mixture_graph().layers)
    with pytest.raises(InputError, match="the profile has none"):
        planned(LayerGraph(layers=layers))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan.with_expert_ranks(3), "expert_ranks is 3, and the stage has 2 copies"),
        (lambda plan: plan.with_reducer("all-reduce"), "do not go with reducer='all-reduce'"),
        (lambda plan: plan.with_tensor_split(2, {}), "tensor_ranks"),
        (
            lambda plan: planned(size=1, replicas="2-1").with_expert_ranks(2, [0]),
            None,
        ),
        (
            lambda plan: planned(size=1, replicas="2-1", microbatches=5).with_expert_ranks(2, [0]),
            "copies of a stage that divide its experts exchange tokens",
        ),
    ],
)
def test_a_plan_that_is_edited_is_looked_at_again(change, words):
    if words is None:
        assert [stage.expert_ranks for stage in change(planned()).stages] == [2, 1]
        return
    with pytest.raises(InputError, match=words):
        change(planned())


def test_by_default_stages_without_experts_divide_none():
    plain, *others = mixture_graph().layers
    bare = [replace(layer, experts=()) for layer in others[:1]]
    graph = LayerGraph(layers=(plain, *bare, *others[1:]), microbatch_size=2)
    whole, divided = planned(graph, size=1), planned(graph)
    assert [stage.expert_ranks for stage in divided.stages] == [1, 2]
    edited = whole.with_expert_ranks(2)
    assert [stage.expert_ranks for stage in edited.stages] == [1, 2]
    assert edited.with_expert_ranks(1) == whole
    assert divided.with_expert_ranks(1).with_expert_ranks(2).stages[0].expert_ranks == 1
    # Of a plan that was written by hand, nobody knows.
    stages = tuple(replace(stage, expert_loads=()) for stage in whole.stages)
    by_hand = replace(whole, stages=stages).with_expert_ranks(2)
    assert [stage.expert_ranks for stage in by_hand.stages] == [2, 2]


def test_where_no_stage_has_copies_none_divide_experts():
    plan = planned(size=1, replicas="1-1", count=2)
    with pytest.raises(InputError, match="no stage with experts of this plan has several"):
        plan.with_expert_ranks(2)
    assert plan.with_expert_ranks(1) == plan


def test_replanning_keeps_whole_bytes_in_mind():
    with pytest.raises(InputError, match="give replan the model's graph"):
        pk.replan(planned(), cluster(2))
    anew = pk.replan(planned(), cluster(2), graph=mixture_graph())
    assert sum(stage.parameter_bytes for stage in anew.stages) == 240 * MEGA


def test_copies_with_fewer_experts_take_as_long_as_was_measured():
    everyone, fewer = (
        planned(mixture_graph(fewer=shares), size=4, replicas=(4,)) for shares in ((), (0.8, 0.6))
    )
    (before,), (after,) = everyone.stages, fewer.stages
    # Of four layers two are mixtures, half of whose passes are their experts'.
    assert before.forward_seconds - after.forward_seconds == pytest.approx(2 * 0.1 * 0.5 * 0.4)
    own = ExpertPart(name="e", num_experts=8, fewer=(0.8, 0.6))
    assert [own.pace(ranks) for ranks in (1, 2, 4, 8)] == pytest.approx([1, 0.8, 0.6, 0.6])
    assert replace(own, loads=(0.3, *[0.1] * 7)).pace(2) == pytest.approx(0.8 * 1.2)


def test_experts_of_a_part_are_read_and_refused():
    part = ExpertPart(name="e", num_experts=4, loads=(0.4, 0.3, 0.2, 0.1))
    assert part.rank_loads(2) == (0.7, 0.3) and part.imbalance(4) == pytest.approx(1.6)
    assert ExpertPart(name="e", num_experts=4).imbalance(2) == pytest.approx(1.0)
    with pytest.raises(InputError, match="loads has 2 shares of 4 experts"):
        replace(part, loads=(0.5, 0.5))


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("torchtitan", ("expert_parallel_degree=2", "data_parallel_shard_degree=2")),
        ("megatron", ("--expert-model-parallel-size 2",)),
    ],
)
def test_other_engines_are_given_the_degree_and_their_configs_have_it(engine, words):
    layers = [replace(layer, name=f"layers.{layer.name}") for layer in mixture_graph().layers]
    ends = [
        Layer(name=name, forward_seconds=0.0, backward_input_seconds=0.0,
              backward_weight_seconds=0.0, output_bytes=MEGA)
        for name in ("tok_embeddings", "output")
    ]  # fmt: skip
    graph = LayerGraph(layers=(ends[0], *layers, ends[1]), microbatch_size=2)
    plan = planned(graph, schedule="1f1b", cuts=[3])
    handed = plan.to(engine)
    text = str(handed)
    for word in words:
        assert word in text
    again = Plan.of(engine, text, graph, cluster())
    assert {stage.expert_ranks for stage in again.stages} == {2} and again.replicas == (2, 2)
    bare = LayerGraph(layers=tuple(replace(layer, experts=()) for layer in graph.layers))
    left_out = Plan.of(engine, text, bare, cluster())
    assert any("expert parallelism over 2 ranks is left out" in w for w in left_out.warnings)


@pytest.mark.parametrize("engine", ["torch", "automodel", "deepspeed"])
def test_engines_that_keep_mixtures_whole_refuse_and_name_the_nearest_plan(engine):
    with pytest.raises(PlanError, match="2 copies of a stage divide its experts"):
        planned().to(engine)
    with pytest.raises(InputError, match="expert_ranks=2 is nothing that"):
        planned(engine=engine)
