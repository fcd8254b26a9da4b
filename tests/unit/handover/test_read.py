"""Configs of other engines become the plans that they describe, and those that Penstock writes
come back."""

import json
from types import SimpleNamespace

import pytest

import penstock as pk
from penstock.planning.handover.deepspeed import balanced, uniform
from penstock.planning.handover.megatron import layout_string, stages_of_layout
from penstock.planning.handover.modules import TransformerStages
from penstock.planning.planner.adopting import improved
from tests.kit.transformer import graph_of, llama_names, llama_plan

GRAPH = graph_of(llama_names(12))


def counts(plan):
    return [len(stage.layers) for stage in plan.stages]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v", "v-half", "zb-h1"])
def test_what_torchtitan_is_given_comes_back(schedule, tmp_path):
    plan = llama_plan(schedule, 2, 4)
    handed = plan.to("torchtitan")
    handed.save(tmp_path)
    path = str(tmp_path / "schedule.csv")
    text = str(handed).replace('str(FOLDER / "schedule.csv")', repr(path))
    back = pk.Plan.of("torchtitan", text, graph_of(llama_names()))
    assert back.schedule == plan.schedule
    assert back.stages == plan.stages
    assert back.build_schedule() == plan.build_schedule()
    assert not back.warnings


@pytest.mark.parametrize(
    "wanted",
    [
        {"schedule": "1f1b", "ranks": 2},
        {"schedule": "1f1b", "ranks": 4, "replicas": "2-2", "microbatches": 8},
        {
            "schedule": "1f1b",
            "ranks": 4,
            "replicas": "2-2",
            "reducer": "sharded",
            "microbatches": 8,
        },
        {"schedule": "interleaved-1f1b", "ranks": 2},
        {"schedule": "interleaved-1f1b:stages_per_rank=3", "ranks": 2},
        {"schedule": "1f1b", "ranks": 2, "recompute": "layers"},
    ],
)
def test_what_megatron_is_given_comes_back(wanted):
    plan = llama_plan(**wanted, names=llama_names(12))
    handed = plan.to("megatron")
    back = pk.Plan.of("megatron", str(handed), GRAPH, pk.Cluster.local(wanted["ranks"]))
    moved = any("wherever the plan has it" in note for note in handed.notes)
    assert back.schedule == plan.schedule
    assert back.given_replicas == plan.given_replicas
    assert back.summing.reducer == plan.summing.reducer
    assert [stage.recompute for stage in back.stages] == [s.recompute for s in plan.stages]
    assert moved or back.stages == plan.stages
    assert str(back.to("megatron")) == str(handed)


def test_what_deepspeed_is_given_comes_back():
    plan = llama_plan("1f1b", 4, 8, replicas="2-2", reducer="sharded", cuts=["layers.3"])
    config = json.loads(plan.to("deepspeed").files["ds_config.json"])
    said = {**config, "num_stages": 2, "partition_method": "uniform"}
    back = pk.Plan.of("deepspeed", said, graph_of(llama_names()), pk.Cluster.local(4))
    assert counts(back) == [5, 4]  # nine layers, of which DeepSpeed gives the first stage more
    assert back.given_replicas == (2, 2)
    assert (back.num_microbatches, back.microbatch_size) == (8, 1)
    assert back.summing.reducer == "sharded"


def test_torchtitan_divides_blocks_by_itself():
    text = """
def mine():
    config = llama3_8b()
    config.parallelism.pipeline_parallel_degree = 4
    config.training.local_batch_size = 8
    config.activation_checkpoint = FullAC.Config()
    return config
"""
    plan = pk.Plan.of("torchtitan", text, GRAPH)
    assert counts(plan) == [4, 4, 3, 4]  # 14 with embedding and head, of which the ends count one
    assert plan.schedule == "1f1b"
    assert plan.num_microbatches == 8
    assert {stage.recompute for stage in plan.stages} == {"layers"}


def test_torchtitans_own_objects_and_arguments_are_read():
    config = SimpleNamespace(
        parallelism=SimpleNamespace(
            pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBVZeroBubble",
            data_parallel_shard_degree=-1,
        ),
        training=SimpleNamespace(local_batch_size=4),
    )  # fmt: skip
    plan = pk.Plan.of("torchtitan", config, GRAPH, pk.Cluster.local(4))
    assert (plan.schedule, plan.num_ranks, plan.replicas) == ("zb-v", 4, (2, 2, 2, 2))
    assert not plan.warnings
    flags = "--parallelism.pipeline_parallel_degree=2 --training.local_batch_size 6"
    assert pk.Plan.of("torchtitan", flags, GRAPH).num_microbatches == 6


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ("--pipeline-model-parallel-size 4", [4, 3, 3, 5]),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
         [4, 3, 3, 5]),
        ("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2", [3, 5, 7]),
        ("--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 3", [10, 5]),
        ("--pipeline-model-parallel-size 7 --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split", [2, 2, 2, 2, 2, 2, 3]),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'E|(t|)*11,t*1L'",
         None),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*5|t*3|t*4|L'",
         [6, 3, 4, 2]),
    ],
)  # fmt: skip
def test_megatron_divides_blocks_by_itself(arguments, sizes):
    text = f"#!/bin/bash\ntorchrun pretrain_gpt.py \\\n  {arguments} \\\n  --micro-batch-size 1 "
    text += "--global-batch-size 28\n"
    if sizes is None:
        with pytest.raises(pk.InputError, match="13 stages, which 2 ranks cannot share"):
            pk.Plan.of("megatron", text, GRAPH)
        return
    plan = pk.Plan.of("megatron", text, GRAPH)
    assert counts(plan) == sizes
    assert plan.num_microbatches == 28


def test_megatron_data_parallelism_follows_from_the_devices():
    arguments = "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8"
    plan = pk.Plan.of("megatron", arguments, GRAPH, pk.Cluster.local(4))
    assert (plan.given_replicas, plan.num_microbatches) == ((2, 2), 8)
    wide = f"{arguments} --context-parallel-size 2 --recompute-activations"
    plan = pk.Plan.of("megatron", wide, GRAPH, pk.Cluster.local(4))
    assert plan.given_replicas == ()
    assert any("context_parallel_size is 2" in warning for warning in plan.warnings)
    assert any("selective" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Ettt|(tt|)*3,m|L", ["Ettt", "tt", "tt", "tt", "m", "L"]),
        ("E t*4 | t*4 L", ["Etttt", "ttttL"]),
        ("(t|)*2L", ["t", "t", "L"]),
        ("E||L", ["E", "", "L"]),
    ],
)
def test_layout_strings(layout, stages):
    assert stages_of_layout(layout) == stages


@pytest.mark.parametrize(
    "blocks", [(3,), (2, 2), (5, 2, 2, 2, 3), (1, 0, 0, 0, 1), (0, 4, 4, 0), (3, 3, 3, 3)]
)
def test_layouts_are_written_as_they_are_read(blocks):
    empty = tuple(() for _ in blocks)
    letters = ["t" * count for count in blocks]
    letters[0] = f"E{letters[0]}"
    letters[-1] += "L"
    assert stages_of_layout(layout_string(TransformerStages("", empty, blocks, empty))) == letters


def test_deepspeeds_cuts():
    assert uniform(8, 3) == [0, 3, 6, 8]
    assert balanced([1, 1, 1, 1], 2) == [0, 2, 4]
    assert balanced([3, 1, 4, 1, 5, 9, 2, 6], 3) == [0, 5, 6, 8]  # of equals, the latest
    kinds = pk.LayerGraph(
        layers=tuple(
            pk.Layer(
                name=str(place), kind=kind, forward_seconds=1e-3, backward_input_seconds=1e-3,
                backward_weight_seconds=1e-3,
            )
            for place, kind in enumerate(["Embedding", "Block", "Block", "Norm", "Block", "Block"])
        )
    )  # fmt: skip
    said = {"gradient_accumulation_steps": 4, "num_stages": 2, "partition_method": "type:block"}
    assert [len(s.layers) for s in pk.Plan.of("deepspeed", said, kinds).stages] == [4, 2]


@pytest.mark.parametrize(
    ("engine", "config", "message"),
    [
        ("torchtitan", "x = 1", "the config sets none of"),
        ("torchtitan", "f(", "the config is no Python"),
        ("torchtitan", "f(pipeline_parallel_degree=PP)", r"pipeline_parallel_degree is 'PP'"),
        ("torchtitan", "f(pipeline_parallel_degree=2, pipeline_parallel_schedule='Mine')",
         "'Mine', a schedule that is not here"),
        ("torchtitan", "f(pipeline_parallel_degree=2, local_batch_size=5, "
         "pipeline_parallel_microbatch_size=2)", "no multiple of microbatches of 2 rows"),
        ("torchtitan", "f(pipeline_parallel_degree=2, module_fqns_per_model_part=[['a'], ['b']])",
         "begins with 'b', which is no layer"),
        ("torchtitan", "f(pipeline_parallel_degree=2, module_fqns_per_model_part=parts)",
         "is computed; give the list"),
        ("megatron", "--pipeline-model-parallel-size $PP", "pipeline_model_parallel_size is"),
        ("megatron", "--pipeline-model-parallel-size 'x", "cannot be read"),
        ("megatron", "--pipeline-model-parallel-size 5", "do not divide evenly over 5 ranks"),
        ("megatron", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout EtX|L",
         "has 'X'; its letters are"),
        ("megatron", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL",
         r"1 \+ 1 blocks, but 'layers' of the model has 12"),
        ("megatron",
         "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout 'Et*12||L'",
         "stage 1 of the config has no layers"),
        ("megatron", "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 3",
         "no multiple of 1 copies × 2 rows"),
        ("deepspeed", "{", "no JSON"),
        ("deepspeed", {"train_batch_size": 8}, "does not set num_stages"),
        ("deepspeed", {"num_stages": 2, "zero_optimization": {"stage": 3}}, "1 at most, not 3"),
        ("deepspeed", {"num_stages": 2, "partition_method": "best"}, "parameters and type:"),
        ("deepspeed", {"num_stages": 99}, "15 layers cannot make 99 stages"),
        ("deepspeed", {"num_stages": 2, "train_batch_size": 8, "gradient_accumulation_steps": 3,
                       "train_micro_batch_size_per_gpu": 1}, "8 is not 1 rows × 3"),
        ("torch", "", "are not read here; take one of torchtitan, megatron, automodel, deepspeed"),
        ("jax", "", "are not read here"),
        ("torchtitan", "f(pipeline_parallel_degree=2, module_fqns_per_model_part="
         "[['tok_embeddings'], ['layers.0'], ['layers.5', 'norm', 'lm_head']])",
         "in no stage|3 stages, which 2 ranks cannot share"),
        ("automodel", "a: [", "the config is no YAML"),
        ("automodel", "- 1", "the config is of type list; give a recipe"),
        ("automodel", "a: 1", "the config sets none of"),
        ("automodel", "pp_sise: 2", "sets 'pp_sise', .* write pp_size|sets none of"),
        ("automodel", {"pp_size": 2, "pp_schedule": "mine"}, "pp_schedule is 'mine', a schedule"),
        ("automodel", {"pp_size": 2, "local_batch_size": 5,
                       "pipeline": {"pp_microbatch_size": 2}}, "no multiple of microbatches of 2"),
        ("automodel", {"pp_size": 2}, "makes 1 microbatches of 1 rows, fewer than 2 ranks"),
        ("automodel", {"pp_size": 2, "local_batch_size": 4, "layers_per_stage": 5},
         "12 blocks make no 3 stages on 2 ranks"),
        ("automodel", {"pp_size": 2, "local_batch_size": 4, "layers_per_stage": "x"},
         "layers_per_stage is 'x'"),
    ],
)  # fmt: skip
def test_what_a_config_says_wrong_is_one_clear_error(engine, config, message):
    with pytest.raises(pk.InputError, match=message):
        pk.Plan.of(engine, config, GRAPH)


def test_nothing_of_a_config_is_run(tmp_path):
    made = tmp_path / "made"
    text = f"open({str(made)!r}, 'w')\nf(pipeline_parallel_degree=2)"
    assert pk.Plan.of("torchtitan", text, GRAPH).num_ranks == 2
    assert not made.exists()


def test_too_few_devices_and_too_little_memory_are_said():
    arguments = "--pipeline-model-parallel-size 4 --global-batch-size 4"
    with pytest.raises(pk.PlanError, match="needs 4 devices, but the cluster has 2"):
        pk.Plan.of("megatron", arguments, GRAPH, pk.Cluster.local(2))
    small = pk.Cluster(devices=tuple(pk.Device(name=f"d{i}", memory_bytes=10**7) for i in range(4)))
    plan = pk.Plan.of("megatron", arguments, GRAPH, small)
    assert plan.devices == small.devices
    assert any("is predicted to need" in warning for warning in plan.warnings)


def test_a_better_plan_stands_beside_with_the_lines_to_change():
    cluster = pk.Cluster.local(4)
    arguments = "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8"
    plan = pk.Plan.of("megatron", arguments, GRAPH, cluster)
    better = improved(plan, "megatron", GRAPH, cluster)
    assert better.after.step_seconds < plan.step_seconds
    assert "+    --pipeline-model-parallel-size 1" in better.lines
    text = str(better)
    assert "a better plan" in text
    assert better.lines in text
    best = improved(better.after, "megatron", GRAPH, cluster)
    assert best.after == better.after
    assert best.lines == ""
    assert "nothing to change" in str(best)


@pytest.mark.parametrize(
    ("engine", "config", "problem"),
    [
        ("megatron", "--num-layers 13 --pipeline-model-parallel-size 2", "num_layers is 13"),
        (
            "megatron",
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--global-batch-size 5",
            "5 microbatches in rounds of 2 leave 1 for the last round",
        ),
        (
            "torchtitan",
            {"pipeline_parallel_degree": 2, "module_fqns_per_model_part": "layers.0"},
            "give a list of names for each stage",
        ),
        (
            "torchtitan",
            {
                "pipeline_parallel_degree": 2,
                "module_fqns_per_model_part": [["tok_embeddings"], ["layers.11", "norm"]],
            },
            "in no stage",
        ),
        ("deepspeed", {"num_stages": 4, "partition_method": "type:((("}, "which is no pattern"),
        ("deepspeed", {"num_stages": 4, "partition_method": "type:x9"}, "no layer is of that kind"),
        ("deepspeed", {"num_stages": 4, "zero_optimization": 7}, "zero_optimization is 7"),
    ],
)
def test_contradictions_are_refused_by_name(engine, config, problem):
    with pytest.raises(pk.InputError, match=problem):
        pk.Plan.of(engine, config, GRAPH)


@pytest.mark.parametrize(
    ("engine", "config", "num_devices", "problem"),
    [
        ("deepspeed", {"num_stages": 4, "partition_method": "uniform"}, 6,
         "groups of 4 devices, and 6 are no multiple of that, which DeepSpeed refuses"),
        ("megatron", "--pipeline-model-parallel-size 3", 4, "groups of 3 devices, and 4"),
        ("megatron", "--pipeline-model-parallel-size 2 --context-parallel-size 2 "
         "--tensor-model-parallel-size 2", 12, "groups of 8 devices, and 12"),
        ("torchtitan", "f(pipeline_parallel_degree=2, context_parallel_degree=2)", 6,
         "groups of 4 devices, and 6 .* torchtitan refuses"),
        ("torchtitan", "f(pipeline_parallel_degree=2, data_parallel_shard_degree=2)", 6,
         "degrees make 4 devices, and the cluster has 6"),
    ],
)  # fmt: skip
def test_devices_that_are_left_over_are_refused(engine, config, num_devices, problem):
    with pytest.raises(pk.InputError, match=problem):
        pk.Plan.of(engine, config, GRAPH, pk.Cluster.local(num_devices))


@pytest.mark.parametrize(
    ("engine", "config", "wrong", "meant"),
    [
        ("torchtitan", "f(pipeline_parallel_degre=2)", "pipeline_parallel_degre",
         "pipeline_parallel_degree"),
        ("torchtitan", "c.parallelism.pipeline_paralel_degree = 2", "pipeline_paralel_degree",
         "pipeline_parallel_degree"),
        ("torchtitan", {"parallelism": {"pipeline_parallel_schedules": "1F1B"}},
         "pipeline_parallel_schedules", "pipeline_parallel_schedule"),
        ("torchtitan", "--parallelism.tensor_paralell_degree 2", "tensor_paralell_degree",
         "tensor_parallel_degree"),
        ("torchtitan", SimpleNamespace(training=SimpleNamespace(local_batchsize=2)),
         "local_batchsize", "local_batch_size"),
        ("megatron", "--pipeline-model-parallel-sise 4", "pipeline_model_parallel_sise",
         "pipeline_model_parallel_size"),
        ("deepspeed", '{"num_stages": 4, "train_batchsize": 4}', "train_batchsize",
         "train_batch_size"),
    ],
)  # fmt: skip
def test_mistyped_fields_are_told_the_one_that_is_meant(engine, config, wrong, meant):
    with pytest.raises(pk.InputError, match=f"sets '{wrong}', .*; write {meant}, if"):
        pk.Plan.of(engine, config, GRAPH)


@pytest.mark.parametrize(
    ("engine", "config"),
    [
        ("torchtitan", "f(pipeline_parallel_degree=2, global_batch_size=64, local_batch_size=8)"),
        ("torchtitan", "f(pipeline_parallel_degree=2, global_batch_size=64)"),
        # What is meant is there, too: the other one is somebody else's.
        ("torchtitan", "f(pipeline_parallel_degree=2); g(pipeline_parallel_degrees=[2, 4])"),
        ("deepspeed", {"num_stages": 2, "max_train_micro_batch_size_per_gpu": 4}),
    ],
)
def test_other_fields_with_names_alike_are_left_alone(engine, config):
    assert pk.Plan.of(engine, config, GRAPH).num_ranks == 2


def test_a_field_of_the_config_is_no_argument():
    with pytest.raises(pk.ArgumentError, match=r"'num_stages': it is a field of the config, as in"):
        pk.Plan.of("deepspeed", {"train_batch_size": 8}, GRAPH, num_stages=4)
    with pytest.raises(pk.ArgumentError, match=r"Plan\.of\(\) lacks graph"):
        pk.Plan.of("deepspeed", {"num_stages": 4})


LAYOUT = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ("t*6|t*6L", "does not begin with E"),
        ("tE*1t*5|t*6L", "does not begin with E"),
        ("Et*6|Et*6L", "does not begin with E, the embedding, once"),
        ("Et*6|t*6", "does not end with L"),
        ("Et*6|Lt*6", "does not end with L"),
        ("Et*6|t*6mL", "has m, layers that predict more tokens"),
        ("Et*6|(t|)*999999999", "no model is so deep"),
        ("Et*6|(t*999|)*999", "no model is so deep"),
    ],
)
def test_layouts_that_megatron_or_a_plan_has_not(layout, problem):
    with pytest.raises(pk.InputError, match=problem):
        pk.Plan.of("megatron", f"{LAYOUT} '{layout}'", GRAPH)


@pytest.mark.parametrize(
    "layout",
    [
        [["embedding", *["decoder"] * 8], [*["decoder"] * 4, "loss"]],
        ["Etttttttt", "ttttL"],
        SimpleNamespace(input_data="Et*8|t*4L"),  # as a TransformerConfig keeps it
    ],
)
def test_layouts_as_lists_and_as_megatron_keeps_them(layout):
    config = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": layout}
    assert counts(pk.Plan.of("megatron", config, GRAPH)) == [9, 6]


def test_a_layout_of_something_else_is_refused():
    config = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": [["block"], 3]}
    with pytest.raises(pk.InputError, match="give a list for each stage, of embedding, decoder"):
        pk.Plan.of("megatron", config, GRAPH)


ROUNDS = (
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--global-batch-size {} --microbatch-group-size-per-virtual-pipeline-stage {}"
)


@pytest.mark.parametrize(
    ("count", "size", "problem"),
    [
        (4, 1, "is 1; Megatron takes 2, the number of ranks, to 4"),
        (4, 5, "is 5; Megatron takes 2"),
        (4, 3, "4 microbatches in rounds of 3 leave 1 for the last round, fewer than 2 ranks"),
    ],
)
def test_rounds_that_megatron_refuses(count, size, problem):
    with pytest.raises(pk.InputError, match=problem):
        pk.Plan.of("megatron", ROUNDS.format(count, size), GRAPH)


@pytest.mark.parametrize(("count", "size"), [(4, 2), (4, 4), (5, 3), (6, 3)])
def test_rounds_of_more_microbatches_than_ranks_are_noted(count, size):
    plan = pk.Plan.of("megatron", ROUNDS.format(count, size), GRAPH)
    assert (plan.schedule, plan.num_microbatches) == ("interleaved-1f1b", count)
    assert bool(plan.warnings) == (size > 2)
    assert all(f"is {size}, and rounds of the plan have 2" in text for text in plan.warnings)


@pytest.mark.parametrize(
    "wanted",
    [
        {"schedule": "1f1b", "ranks": 2},
        {"schedule": "interleaved-1f1b", "ranks": 2},
        {"schedule": "zb-v", "ranks": 2},
        {"schedule": "v-half", "ranks": 2},
        {"schedule": "1f1b", "ranks": 4, "replicas": "2-2", "microbatches": 8},
        {"schedule": "1f1b", "ranks": 4, "replicas": "2-2", "microbatches": 8,
         "reducer": "sharded"},
        {"schedule": "1f1b", "ranks": 2, "recompute": "layers"},
    ],
)  # fmt: skip
def test_what_automodel_is_given_comes_back(wanted, tmp_path):
    names = llama_names(prefix="model.")
    plan = llama_plan(**wanted, names=names)
    handed = plan.to("automodel")
    handed.save(tmp_path)
    text = str(handed).replace('"schedule.csv"', f'"{tmp_path / "schedule.csv"}"')
    back = pk.Plan.of("automodel", text, graph_of(names), pk.Cluster.local(wanted["ranks"]))
    assert back.schedule == plan.schedule
    assert back.stages == plan.stages
    assert back.build_schedule() == plan.build_schedule()
    assert back.summing.reducer == plan.summing.reducer
    assert not back.warnings


@pytest.mark.parametrize(
    ("pipeline", "sizes"),
    [
        ({}, [7, 8]),
        ({"pp_schedule": "Interleaved1F1B"}, [4, 3, 3, 5]),
        ({"pp_schedule": "Interleaved1F1B", "layers_per_stage": 2}, [3, 2, 2, 2, 2, 4]),
        ({"pp_schedule": "Interleaved1F1B", "layers_per_stage": 5,
          "round_virtual_stages_to_pp_multiple": "up"}, [4, 3, 3, 5]),
        ({"layers_per_stage": 5, "round_virtual_stages_to_pp_multiple": "down"}, [7, 8]),
    ],
)  # fmt: skip
def test_automodel_divides_blocks_by_itself(pipeline, sizes):
    recipe = {
        "distributed": {"pp_size": 2, "pipeline": pipeline},
        "step_scheduler": {"local_batch_size": 4, "global_batch_size": 16},
    }
    plan = pk.Plan.of("automodel", recipe, GRAPH)
    assert counts(plan) == sizes
    assert plan.num_microbatches == 4
    assert plan.warnings == (
        "global_batch_size is 16: gradients of 4 passes of 4 rows make one update, and the plan is "
        "of one pass",
    )


def test_automodels_sizes_and_devices():
    recipe = {"pp_size": 2, "local_batch_size": 4, "cp_size": 2, "dp_replicate_size": 1}
    plan = pk.Plan.of("automodel", recipe, GRAPH, pk.Cluster.local(8))
    assert plan.given_replicas == (2, 2)
    assert plan.summing.reducer == "sharded"
    assert any("cp_size is 2" in warning for warning in plan.warnings)
    plain = pk.Plan.of("automodel", {**recipe, "strategy": "ddp"}, GRAPH, pk.Cluster.local(8))
    assert plain.summing.reducer == "owners"
    with pytest.raises(pk.InputError, match=r"groups of 4 devices, and 6 .* AutoModel refuses"):
        pk.Plan.of("automodel", recipe, GRAPH, pk.Cluster.local(6))
    with pytest.raises(pk.InputError, match="sizes make 4 devices, and the cluster has 8"):
        pk.Plan.of("automodel", {**recipe, "dp_size": 1}, GRAPH, pk.Cluster.local(8))


def test_a_recipe_that_names_itself_many_times_is_read_once():
    """Each line doubles what a walk would meet: 2 to the 60 mappings."""
    rows = ["g0: &g0 {pp_size: 2, local_batch_size: 4}"]
    rows += [f"g{k}: &g{k} {{a: *g{k - 1}, b: *g{k - 1}}}" for k in range(1, 60)]
    assert pk.Plan.of("automodel", "\n".join(rows), GRAPH).num_ranks == 2
