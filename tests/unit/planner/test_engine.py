"""Plans that another engine runs as they are."""

from functools import cache

import pytest
from msgspec.structs import replace

import penstock as pk
from penstock.planning.handover import CAPABILITIES
from tests.kit.transformer import graph_of, llama_names

GRAPH = graph_of(llama_names(10), output_bytes=2_000_000)


def slow_links(num_devices, memory_bytes=0):
    """Devices between which replicas would not pay."""
    devices = tuple(
        pk.Device(name=f"d{place}", memory_bytes=memory_bytes) for place in range(num_devices)
    )
    return pk.Cluster(devices=devices, link=pk.Link(bytes_per_second=3e8))


@cache
def free_seconds(num_devices):
    """Of a step that no engine has to run."""
    return pk.plan(GRAPH, slow_links(num_devices), microbatches=8).step_seconds


@pytest.mark.parametrize("engine", CAPABILITIES)
@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_an_engine_runs_what_is_planned_for_it_as_it_is(engine, num_devices):
    plan = pk.plan(GRAPH, slow_links(num_devices), microbatches=8, engine=engine)
    handed = plan.to(engine)
    assert handed.plan == plan
    able = CAPABILITIES[engine]
    assert able.any_order or plan.schedule in able.families
    assert plan.step_seconds >= free_seconds(num_devices) * 0.99


def test_what_an_engine_cannot_run_is_not_chosen_though_it_were_faster():
    cluster = slow_links(4)
    free = pk.plan(GRAPH, cluster, microbatches=8, schedule="zb-v")
    plan = pk.plan(GRAPH, cluster, microbatches=8, engine="megatron", replicas=(1,) * 4)
    assert free.step_seconds < plan.step_seconds
    assert plan.schedule == "1f1b"


def test_engines_recompute_everywhere_or_nowhere():
    whole = pk.plan(GRAPH, slow_links(2), microbatches=8, schedule="1f1b", stages=2)
    limit = max(whole.rank_bytes) - 500_000
    cluster = slow_links(2, memory_bytes=limit)
    some = pk.plan(GRAPH, cluster, microbatches=8, schedule="1f1b", stages=2)
    assert len({stage.recompute for stage in some.stages}) == 2
    plan = pk.plan(GRAPH, cluster, microbatches=8, schedule="1f1b", stages=2, engine="torchtitan")
    assert len({stage.recompute for stage in plan.stages}) == 1
    assert max(plan.rank_bytes) <= limit
    assert not plan.to("torchtitan").notes


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"engine": "megatron", "schedule": "zb-v"},
            "Megatron-Core does not run zb-v; it has 1f1b",
        ),
        ({"engine": "torchtitan", "replicas": "2-1-1"}, "gives every stage as many replicas"),
        ({"engine": "torchtitan", "replicas": "3-3", "cluster": 6}, "these as many microbatches"),
        ({"engine": "deepspeed", "tensor_ranks": 2}, "tensor_ranks=2 is nothing that DeepSpeed"),
        ({"engine": "torchtitan", "asynchronous": True}, "asynchronous=True is nothing"),
        ({"engine": "torchtitan", "rate": 3.0}, "a rate is nothing"),
        ({"engine": "torchtitan", "spill": "always"}, "spill='always' is nothing"),
        ({"engine": "torchtitan", "recompute": "stage"}, "recompute='stage' is nothing"),
        ({"engine": "megatron", "reducer": "servers"}, "reducer='servers' is nothing"),
        ({"engine": "jax"}, "there is no hand-over to 'jax'"),
    ],
)
def test_what_contradicts_an_engine_is_refused(wanted, message):
    cluster = slow_links(wanted.pop("cluster", 4))
    with pytest.raises(pk.InputError, match=message):
        pk.plan(GRAPH, cluster, microbatches=8, **wanted)


def test_nothing_fits():
    with pytest.raises(pk.PlanError):
        pk.plan(GRAPH, slow_links(2, memory_bytes=1000), microbatches=8, engine="megatron")


def in_parts(name):
    return [f"{name}.attention", f"{name}.mlp"]


BLOCKS = [part for number in range(4) for part in in_parts(f"layers.{number}")]
NAMES = ["tok_embeddings", "rope", *BLOCKS, "norm", "lm_head", "loss"]


def with_heavy_ends(names):
    """A profile whose first and last modules take as long as all blocks: even cuts part them."""
    graph = graph_of(names)
    blocks = [name for name in names if "layers" in name]
    return replace(
        graph,
        layers=tuple(
            layer if layer.name in blocks else layer.paced(len(blocks), len(blocks))
            for layer in (replace(layer, **dict.fromkeys(SECONDS, 1e-3)) for layer in graph.layers)
        ),
    )


SECONDS = ("forward_seconds", "backward_input_seconds", "backward_weight_seconds")


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ("megatron", NAMES),
        ("torchtitan", NAMES),
        ("automodel", [f"model.{name}" if "layers" in name else name for name in NAMES]),
    ],
)
@pytest.mark.parametrize(
    ("num_devices", "schedule"), [(4, "1f1b"), (2, "interleaved-1f1b"), (1, "1f1b")]
)
def test_cuts_are_where_the_engine_cuts(engine, names, num_devices, schedule):
    """Megatron-Core has what stands before the blocks in the first stage, and norm, head and loss
    in the last one; none of these engines cuts a block."""
    graph, cluster = with_heavy_ends(names), slow_links(num_devices)
    wanted = {"microbatches": 8, "schedule": schedule, "stages": 4 if num_devices > 1 else 1}
    if num_devices == 4:
        free = pk.plan(graph, cluster, **wanted)
        with pytest.raises(pk.InputError, match="both have a part of"):
            free.to(engine)
    plan = pk.plan(graph, cluster, engine=engine, **wanted)
    handed = plan.to(engine)
    assert handed.plan == plan
    assert not any("wherever the plan has it" in note for note in handed.notes)


def test_cuts_that_are_asked_for_stay_and_are_noted():
    graph = with_heavy_ends(NAMES)
    plan = pk.plan(
        graph, slow_links(2), microbatches=8, engine="megatron", cuts=["lm_head"], schedule="1f1b"
    )
    assert plan.stages[1].layers == ("lm_head", "loss")
    assert any(
        "norm: Megatron-Core has that in the last stage" in n for n in plan.to("megatron").notes
    )


def test_a_model_without_blocks_is_cut_anywhere():
    plan = pk.plan(
        graph_of(["a", "b", "c"]), slow_links(3), microbatches=8, engine="megatron",
        schedule="1f1b", stages=3,
    )  # fmt: skip
    assert len(plan.stages) == 3
