"""Plans in other engines' words: what is written, what is refused, what is noted with its cost."""

import ast
import json
import re

import pytest

import penstock as pk
from penstock.base.units import format_bytes, format_seconds
from penstock.core.schedule import families
from penstock.planning.handover import CAPABILITIES, from_torch_csv, hand_over, nearest
from penstock.planning.handover.properties import PROPERTIES, placement, placement_of
from penstock.planning.plans.spilling import Offload
from tests.kit.transformer import graph_of, llama_names, llama_plan

ENGINES = list(CAPABILITIES)


def fields_in(text):
    """Keywords with plain values in a call of Python text."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    keywords = [keyword for call in calls for keyword in call.keywords]
    plain = (ast.Constant, ast.List)
    return {k.arg: ast.literal_eval(k.value) for k in keywords if isinstance(k.value, plain)}


def test_torchtitan_is_given_stages_degrees_microbatches_and_schedule():
    plan = llama_plan("zb-v", 2, 4)
    handed = plan.to("torchtitan")
    fields = fields_in(str(handed))
    assert fields["pipeline_parallel_degree"] == 2
    assert fields["module_fqns_per_model_part"] == [list(stage.layers) for stage in plan.stages]
    assert fields["pipeline_parallel_schedule"] == "ZBVZeroBubble"
    assert fields["pipeline_parallel_microbatch_size"] == 1
    assert fields["local_batch_size"] == 4
    assert from_torch_csv(handed.files["schedule.csv"]) == plan.build_schedule()
    assert handed.plan == plan
    assert handed.notes == ()


@pytest.mark.parametrize(
    ("schedule", "name"),
    [("1f1b", "1F1B"), ("zb-h1", "1F1B"), ("interleaved-1f1b", "Interleaved1F1B"),
     ("breadth-first", "Interleaved1F1B"), ("v-half", "ZBVZeroBubble"), ("v-min", "ZBVZeroBubble")],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["torchtitan", "automodel"])
def test_the_class_says_only_which_rank_has_which_stage(engine, schedule, name):
    assert f'"{name}"' in str(llama_plan(schedule, 2, 4).to(engine))


def test_copies_shards_and_recomputation_are_degrees():
    plan = llama_plan("1f1b", 4, 8, replicas="2-2", reducer="sharded").recomputing("layers")
    titan = plan.to("torchtitan")
    fields = fields_in(str(titan))
    assert (fields["data_parallel_shard_degree"], fields["data_parallel_replicate_degree"]) == (
        2,
        1,
    )
    assert fields["local_batch_size"] == 4  # of each copy
    assert "FullAC.Config()" in str(titan)
    order = from_torch_csv(titan.files["schedule.csv"])
    assert order == families.build("1f1b", num_ranks=2, num_microbatches=4)
    megatron = str(plan.to("megatron"))
    assert "--use-distributed-optimizer" in megatron
    assert "--global-batch-size 8" in megatron
    assert "--recompute-granularity full" in megatron
    config = json.loads(plan.to("deepspeed").files["ds_config.json"])
    assert config["zero_optimization"] == {"stage": 1}
    assert config["gradient_accumulation_steps"] == 4
    replicated = llama_plan("1f1b", 4, 8, replicas="2-2").to("torchtitan")
    assert fields_in(str(replicated))["data_parallel_replicate_degree"] == 2


def test_one_device_and_plain_data_parallelism_have_no_pipeline():
    plan = pk.plan(graph_of(llama_names()), pk.Cluster.local(4), microbatches=4, replicas=(4,))
    for engine in ENGINES[1:]:
        handed = plan.to(engine)
        assert "schedule.csv" not in handed.files
    assert "--pipeline-model-parallel-size 1" in str(plan.to("megatron"))


def test_tensor_ranks_are_a_degree_and_said_to_be_split_otherwise():
    plan = llama_plan("1f1b", 2, 4).with_tensor_split(2, {"lm_head": "column", "norm": "sequence"})
    handed = plan.to("torchtitan")
    fields = fields_in(str(handed))
    assert (fields["tensor_parallel_degree"], fields["enable_sequence_parallel"]) == (2, True)
    assert "key and value heads" in handed.notes[-1]
    assert "--sequence-parallel" in str(plan.to("megatron"))
    with pytest.raises(pk.PlanError, match="2 devices share every layer, but DeepSpeed"):
        plan.to("deepspeed")


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_written_is_what_a_parser_takes(engine, tmp_path):
    handed = llama_plan("1f1b", 2, 4).to(engine)
    handed.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*handed.files}
    for name, text in handed.files.items():
        assert (tmp_path / name).read_text() == text
        if name.endswith(".py"):
            compile(text, name, "exec")
        elif name.endswith(".json"):
            json.loads(text)
    assert str(handed) == next(iter(handed.files.values()))
    assert CAPABILITIES[engine].version in str(handed) or engine == "megatron"


def test_a_v_in_megatron_is_slower_and_the_note_has_the_simulators_numbers(tmp_path):
    plan = llama_plan("v-half", 2, 4)
    handed = plan.to("megatron")
    note = handed.notes[0]
    assert "v-half has stages 0, 3 on rank 0, but Megatron-Core places stage s" in note
    assert "pipeline_parallel_layer_layout.py" in note
    assert f"{format_seconds(handed.plan.step_seconds)} instead of" in note
    assert format_seconds(plan.step_seconds) in note
    assert format_bytes(max(handed.plan.rank_bytes)) in note
    assert handed.plan.schedule == "interleaved-1f1b"
    assert [stage.layers for stage in handed.plan.stages] == [s.layers for s in plan.stages]
    assert [stage.rank for stage in handed.plan.stages] == [0, 1, 0, 1]
    handed.save(tmp_path)
    assert note in (tmp_path / "notes.txt").read_text()


def test_an_order_without_a_name_becomes_the_engines_own():
    handed = llama_plan("zb-h1", 2, 4).to("deepspeed")
    assert handed.plan.schedule == "1f1b"
    assert handed.notes[0].startswith("its order is zb-h1, but DeepSpeed has 1F1B")


def test_uneven_replicas_are_refused_with_the_nearest_plan():
    plan = llama_plan("1f1b", 3, 6, replicas="2-1")
    for engine in ENGINES:
        other = nearest(plan, engine)
        assert other.replicas == (1, 1)
        with pytest.raises(pk.PlanError) as refusal:
            plan.to(engine)
        message = str(refusal.value)
        assert "its stages have 2-1 replicas, but" in message
        assert CAPABILITIES[engine].version in message
        assert f"{format_seconds(other.step_seconds)} a step instead of" in message
        assert f'pk.plan(…, engine="{engine}")' in message
        other.to(engine)


def test_torchtitan_has_names_of_its_own_for_the_modules_of_transformers():
    names = llama_names(prefix="model.")
    names.insert(1, "model.rotary_emb")
    plan = llama_plan("1f1b", 2, 4, names=names)
    handed = plan.to("torchtitan")
    parts = fields_in(str(handed))["module_fqns_per_model_part"]
    assert all(part[-1] == "rotary_emb" for part in parts)
    assert [name for part in parts for name in part[:-1]] == llama_names()
    back = pk.Plan.of("torchtitan", str(handed).replace('str(FOLDER / "schedule.csv")', "''"),
                      graph_of(names))  # fmt: skip
    assert back.stages == plan.stages
    inside = [*names[:2], "model.layers.0.self_attn", "model.layers.0.mlp", *names[3:]]
    with pytest.raises(pk.InputError, match=r"both have a part of 'layers\.0'"):
        llama_plan("1f1b", 2, 4, names=inside, cuts=["model.layers.0.mlp"]).to("torchtitan")


@pytest.mark.xdist_group("llama on meta")
def test_an_estimated_llama_of_transformers_goes_to_torchtitan():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=224, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=64,
        use_cache=False, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(1, 64, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    graph = pk.estimate(model, batch, device="h100-sxm", granularity="block")
    cluster = pk.Cluster.of("dgx-h100", devices_per_host=4)
    for engine in (None, "torchtitan"):
        plan = pk.plan(graph, cluster, microbatches=8, schedule="1f1b", stages=4, engine=engine)
        parts = fields_in(str(plan.to("torchtitan")))["module_fqns_per_model_part"]
        named = [name for part in parts for name in part[:-1]]
        blocks = [f"layers.{number}" for number in range(8)]
        ends = "tok_embeddings", "norm", "lm_head"
        assert [name for name in named if name in {*blocks, *ends}] == [
            ends[0], *blocks, *ends[1:],
        ]  # fmt: skip


def test_what_never_flushes_is_refused():
    plan = llama_plan("pipedream", 2, 4, asynchronous=True)
    with pytest.raises(pk.PlanError, match="pipedream never flushes, but torchtitan"):
        plan.to("torchtitan")
    assert nearest(plan, "torchtitan").schedule == "1f1b"


def test_deepspeed_has_one_stage_per_rank_and_the_nearest_plan_merges():
    plan = llama_plan("zb-v", 2, 4)
    with pytest.raises(pk.PlanError, match=r"stages 0, 3 on rank 0, but DeepSpeed .*one stage"):
        plan.to("deepspeed")
    other = nearest(plan, "deepspeed")
    assert other.layers == plan.layers
    assert len(other.stages) == 2
    assert other.work_seconds == pytest.approx(plan.work_seconds)


def test_parts_that_recompute_recompute_everywhere():
    plan = llama_plan("1f1b", 2, 4).recomputing("stage", [0])
    handed = plan.to("torchtitan")
    assert [stage.recompute for stage in handed.plan.stages] == ["layers", "layers"]
    assert len(handed.notes) == 2
    assert "stage 0 runs forward twice as a whole" in handed.notes[0]
    assert "only stages 0 recompute" in handed.notes[1]
    assert '"stage"' in str(plan.to("deepspeed"))  # whose stages are ours


def test_activations_stay_where_engines_keep_them():
    plan = llama_plan("1f1b", 2, 4).offloading(Offload(tier=pk.Tier(kind="host"), stages=(0,)))
    handed = plan.to("torchtitan")
    assert handed.plan.offload is None
    assert "activations wait in a tier" in handed.notes[0]


def test_what_no_longer_fits_is_refused():
    plan = llama_plan("v-half", 2, 8)
    limit = max(plan.rank_bytes)
    tight = plan.edited(
        devices=tuple(pk.Device(name=f"d{rank}", memory_bytes=limit) for rank in range(2))
    )
    with pytest.raises(pk.PlanError, match=r"rank \d has .*, but needs .* where Megatron-Core"):
        tight.to("megatron")
    assert tight.to("torchtitan").plan == tight


def test_a_cut_through_a_block_is_refused():
    names = ["tok_embeddings", "layers.0.attention", "layers.0.feed_forward", "norm", "lm_head"]
    plan = llama_plan("1f1b", 2, 4, names=names, cuts=["layers.0.feed_forward"])
    for engine in ("torchtitan", "automodel", "megatron"):
        with pytest.raises(pk.InputError, match=r"both have a part of 'layers\.0'"):
            plan.to(engine)


def test_megatron_moves_what_belongs_to_embedding_and_loss():
    plan = llama_plan("1f1b", 2, 4, cuts=["lm_head"])
    handed = plan.to("megatron")
    assert "norm: Megatron-Core has that in the last stage" in handed.notes[0]
    assert "'Et*6|L'" in str(handed)
    with pytest.raises(pk.InputError, match="no layer is a block of a transformer"):
        llama_plan("1f1b", 2, 4, names=["a", "b", "c"]).to("megatron")


def test_megatron_interleaves_whole_rounds_only():
    plan = llama_plan("interleaved-1f1b", 2, 5)
    with pytest.raises(pk.PlanError, match="5 microbatches are no multiple of the 2 ranks") as info:
        plan.to("megatron")
    assert "the nearest plan that it performs is" in str(info.value)
    near = nearest(plan, "megatron")
    assert (near.schedule, len(near.stages), near.num_microbatches) == ("1f1b", 2, 5)
    near.to("megatron")
    cluster = pk.Cluster.local(2)
    planned = pk.plan(
        graph_of(llama_names(12)),
        cluster,
        microbatches=5,
        schedule="interleaved-1f1b",
        engine="megatron",
    )
    assert planned.num_microbatches % planned.num_ranks == 0
    planned.to("megatron")
    assert llama_plan("interleaved-1f1b", 2, 4).to("megatron").plan.schedule == "interleaved-1f1b"


@pytest.mark.parametrize("wrong", ["jax", "", None, 3])
def test_no_such_engine(wrong):
    with pytest.raises(pk.InputError, match=r"engine|hand-over"):
        llama_plan().to(wrong)


def test_every_limit_is_one_of_a_known_property_and_says_where_it_is_read():
    for engine, able in CAPABILITIES.items():
        assert set(able.limits) <= set(PROPERTIES)
        for limit in able.limits.values():
            assert re.fullmatch(r"[a-z_]+(/[a-z_]+)+\.py", limit.source), engine
        assert {"no flush", "uneven replicas", "uneven tensor groups"} <= set(able.limits)
        assert set(able.families) <= set(families.names())


@pytest.mark.parametrize(
    ("stages_of", "name"),
    [(((0,), (1,)), "straight"), (((0, 2), (1, 3)), "loop"), (((0, 3), (1, 2)), "v"),
     (((0, 3, 4), (1, 2, 5)), ""), (((0, 1), (2, 3)), ""), (((0,),), "straight")],
)  # fmt: skip
def test_placements(stages_of, name):
    assert placement_of(stages_of) == name


def test_waves_are_no_placement_of_other_engines():
    plan = llama_plan("hanayo:num_waves=2", 2, 4, names=llama_names(10))
    assert placement(plan) == ""
    handed = hand_over(plan, "torchtitan")
    assert placement(handed.plan) == "loop"
    assert "along one V" in handed.notes[0]
