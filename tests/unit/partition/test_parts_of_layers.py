"""What a split of layers by their parts costs and keeps: of Llama-3 70B, from shapes alone."""

from functools import cache

import pytest
import torch
from msgspec.structs import replace

import penstock as pk
from penstock import Cluster, Device, Layer, LayerGraph, Link
from penstock.base.errors import PlanError
from penstock.core.cluster import Group
from penstock.core.layer_part import LayerPart
from penstock.planning.partition.tensor import split_layers
from penstock.planning.planner.task import Task
from penstock.planning.planner.variants import in_groups

pytestmark = pytest.mark.xdist_group("llama on meta")

NVLINK = Link(bytes_per_second=450e9, latency_seconds=5e-6)
GB = 10**9


@cache
def llama():
    """Llama-3 70B with four of its eighty blocks, for one row of 8,192 tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=4,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
        use_cache=False, tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
        tokens = torch.zeros(1, 8192, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    return pk.estimate(model, batch, device="h100-sxm", granularity="block")


def shared(num_ranks, **options):
    return split_layers(llama(), num_ranks, NVLINK, num_microbatches=8, **options)


def block(graph):
    return next(layer for layer in graph.layers if layer.name == "model.layers.3")


def test_blocks_of_transformers_divide_attention_and_mlp():
    split = shared(8)
    said = split.said("model.layers.3")
    prefix = "model.layers.3."
    assert said[f"{prefix}self_attn.k_proj"] == said[f"{prefix}mlp.gate_proj"] == "column"
    assert said[f"{prefix}self_attn.o_proj"] == said[f"{prefix}mlp.down_proj"] == "row"
    assert split.said("lm_head") == {"lm_head": "vocabulary"}
    whole, part = block(llama()), block(split.graph)
    # All but the norms is divided.
    assert part.parameter_bytes == pytest.approx(whole.parameter_bytes / 8, rel=1e-3)
    assert part.compute_seconds < whole.compute_seconds / 4


def test_activations_are_divided_where_the_split_divides_them():
    whole = block(llama()).activation_bytes
    inside = sum(part.activation_bytes for part in block(llama()).parts)
    assert 0.6 * whole < inside < 0.8 * whole
    repeated_around = block(split_of(without_positions()).graph).activation_bytes
    assert repeated_around == pytest.approx(whole - inside * 7 / 8, rel=1e-6)
    # Other engines gather once more; here each part keeps what its columns have read, whole.
    by_positions = block(shared(8, elsewhere=True).graph).activation_bytes
    assert by_positions == pytest.approx(whole / 8, rel=1e-6)
    read = sum(part.border_bytes for part in block(llama()).parts)
    ours = block(shared(8).graph).activation_bytes
    assert ours == pytest.approx(whole / 8 + read * 7 / 8, rel=1e-6)
    assert by_positions < 0.5 * GB < ours < repeated_around


def split_of(graph):
    return split_layers(graph, 8, NVLINK, num_microbatches=8)


def without_positions():
    layers = (replace(layer, by_positions=False) for layer in llama().layers)
    return replace(llama(), layers=tuple(layers))


def test_positions_and_the_loss_are_divided_by_default_and_pay():
    ours, repeated = shared(8), split_of(without_positions())
    assert "sequence" not in repeated.splits.values()
    assert ours.splits["model.layers.3"] == ours.splits["model.norm"] == "sequence"
    assert ours.said("model.layers.3")["model.layers.3"] == "sequence"
    assert ours.said("lm_head") == {"lm_head": "vocabulary"}
    assert ours.seconds < repeated.seconds
    # Sums of norms' gradients are all that is sent more.
    assert ours.moved_bytes == pytest.approx(repeated.moved_bytes, rel=1e-2)
    *_, head = llama().layers
    gathering = replace(head, parts=tuple(replace(part, loss="whole") for part in head.parts))
    whole = split_of(replace(llama(), layers=(*llama().layers[:-1], gathering)))
    assert whole.said("lm_head") == {"lm_head": "column"}
    assert ours.graph.layers[-1].activation_bytes < whole.graph.layers[-1].activation_bytes / 4
    assert ours.seconds < whole.seconds


def test_heads_that_do_not_divide_are_repeated_and_said_so():
    said = shared(16, elsewhere=True).said("model.layers.3")
    assert not any("self_attn" in name for name in said)
    assert said["model.layers.3.mlp.down_proj"] == "row"
    # Attention that is not shared needs all positions.
    assert said.get("model.layers.3") != "sequence"
    cluster = Cluster(devices=tuple(Device(name=f"d{k}") for k in range(16)), link=NVLINK)
    plan = pk.plan(llama(), cluster, microbatches=1, tensor_ranks=16, stages=1)
    words = "16 tensor ranks cannot share the attention of model.layers.0 and 3 more, since it has "
    assert any(
        warning.startswith(words + "8 heads of keys and values") for warning in plan.warnings
    )


def test_a_plan_for_another_engine_is_one_of_ours():
    cluster = Cluster(devices=tuple(Device(name=f"d{k}") for k in range(2)), link=NVLINK)
    plan = pk.plan(tiny(), cluster, microbatches=2, tensor_ranks=2, stages=1, engine="megatron")
    assert "vocabulary" in plan.stages[0].splits.values()
    model, batch = tiny_model()
    with pk.Pipeline(
        model, plan, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1)
    ) as pipeline:
        first = float(pipeline.step(batch))
        assert float(pipeline.step(batch)) < first


@cache
def tiny_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    model = pk.capture(
        transformers.LlamaForCausalLM(config), batch, granularity="block", verify=False
    )
    return model, batch


def tiny():
    model, batch = tiny_model()
    graph = pk.profile(model, {key: rows[:2] for key, rows in batch.items()}, ranks=0)
    # As if it were large: collectives must be worth it.
    return replace(graph, layers=tuple(layer.paced(1e4, 1e4) for layer in graph.layers))


def words_and_blocks():
    """A table that is large, and seldom read, before two small blocks."""
    common = {"backward_input_seconds": 0.02, "backward_weight_seconds": 0.02}
    table = LayerPart(
        kind="embedding", splits={"words": "row"}, pieces=1000, parameter_bytes=4 * GB,
        output_bytes=GB,
    )  # fmt: skip
    first = Layer(
        name="words", forward_seconds=1e-3, backward_input_seconds=0.0,
        backward_weight_seconds=1e-3, parameter_bytes=4 * GB, optimizer_bytes=8 * GB,
        output_bytes=GB, by_rows=False, parts=(table,),
    )  # fmt: skip
    blocks = [
        Layer(
            name=name,
            forward_seconds=0.02,
            parameter_bytes=GB // 2,
            optimizer_bytes=GB,
            output_bytes=GB,
            by_rows=False,
            **common,
        )
        for name in "ab"
    ]
    return LayerGraph(layers=(first, *blocks))


def test_a_large_embedding_is_divided_where_memory_is_short():
    def cluster(limit):
        devices = tuple(Device(name=f"d{k}", memory_bytes=limit) for k in range(2))
        return Cluster(devices=devices, link=Link(bytes_per_second=10 * GB))

    def planned(limit):
        return pk.plan(
            words_and_blocks(), cluster(limit), microbatches=2, tensor_ranks=2, stages=1,
            spill="never",
        )  # fmt: skip

    assert planned(40 * GB).stages[0].splits["words"] == "whole"  # looking up whole is faster
    short = planned(14 * GB)
    assert short.stages[0].splits["words"] == "row"
    assert max(short.rank_bytes) <= 14 * GB
    with pytest.raises(PlanError, match="no plan fits"):
        planned(6 * GB)


def test_a_device_that_is_left_over_is_said_to_be_idle():
    devices = tuple(Device(name=f"d{k}") for k in range(4))
    plan = pk.plan(words_and_blocks(), Cluster(devices=devices), microbatches=1, tensor_ranks=3)
    assert any("so 1 of the cluster's 4 devices is idle" in words for words in plan.warnings)


def test_groups_that_would_straddle_hosts_are_also_tried_inside_them():
    slow = Link(bytes_per_second=GB)
    names = [f"d{k}" for k in range(8)]
    hosts = tuple(
        Group(
            name=f"host{k}",
            members=tuple(names[4 * k : 4 * k + 4]),
            link=NVLINK,
            card=pk.Card(bytes_per_second=GB),
        )
        for k in range(2)
    )
    cluster = Cluster(devices=tuple(Device(name=name) for name in names), groups=hosts, link=slow)
    tasks = [*in_groups(Task(llama(), cluster, 4), 3)]
    members = [[device.name for device in group] for group in tasks[-1].groups.devices]
    assert members == [["d0", "d1", "d2"], ["d4", "d5", "d6"]]
    assert tasks[-1].groups.tensor_split.seconds < tasks[0].groups.tensor_split.seconds
    assert "so 2 of the cluster's 8 devices are idle" in next(tasks[-1].groups.remarks)
    assert len([*in_groups(Task(llama(), cluster, 4), 4)]) == 1
