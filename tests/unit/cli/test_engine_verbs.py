"""``penstock export``, ``import`` and ``trace``."""

import json

import pytest

import penstock as pk
from tests.kit.command_line import refused, run, succeed
from tests.kit.traces import traced
from tests.kit.transformer import graph_of, llama_names, llama_plan


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    llama_plan("zb-v", 2, 4).save(path)
    return path


def test_a_plan_is_exported_into_a_folder(plan_file, tmp_path):
    said = succeed("export", plan_file, "--to", "torchtitan", "-o", tmp_path / "titan")
    assert said.stderr.startswith("wrote torchtitan_plan.py, schedule.csv into")
    handed = pk.Plan.load(plan_file).to("torchtitan")
    assert (tmp_path / "titan" / "torchtitan_plan.py").read_text() == str(handed)


def test_without_a_folder_it_is_printed_with_notes_beside(plan_file):
    said = succeed("export", plan_file, "--to", "megatron")
    handed = pk.Plan.load(plan_file).to("megatron")
    assert said.stdout.strip() == str(handed).strip()
    assert f"note: {handed.notes[0]}" in said.stderr
    shown = json.loads(run("export", plan_file, "--to", "megatron", "--json"))
    assert shown == {"engine": "megatron", "files": handed.files, "notes": [*handed.notes]}


def test_what_has_no_form_is_refused(plan_file):
    assert "but DeepSpeed 0.19.8 gives every rank one stage" in refused(
        "export", plan_file, "--to", "deepspeed"
    )
    assert "jax" in refused("export", plan_file, "--to", "jax")


@pytest.fixture
def model_files(tmp_path):
    graph, cluster = tmp_path / "graph.json", tmp_path / "cluster.json"
    graph_of(llama_names(12)).save(graph)
    pk.Cluster.local(4).save(cluster)
    return graph, cluster


def test_a_config_is_imported_beside_a_better_plan(model_files, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("python x.py --pipeline-model-parallel-size 4 --global-batch-size 8\n")
    files = [script, *model_files, "--from", "megatron"]
    shown = run("import", *files, "-o", tmp_path / "theirs.json")
    plan = pk.Plan.load(tmp_path / "theirs.json")
    assert plan == pk.Plan.of(
        "megatron", script.read_text(), graph_of(llama_names(12)), pk.Cluster.local(4)
    )
    assert "-    --pipeline-model-parallel-size 4" in shown
    assert "+    --pipeline-model-parallel-size 1" in shown
    result = json.loads(run("import", *files, "--json"))
    assert result["better"]["stages"]
    assert result["plan"]["schedule"] == "1f1b"


def test_deepspeeds_config_needs_a_number_of_stages(model_files, tmp_path):
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1}}')
    files = [config, *model_files, "--from", "deepspeed"]
    assert "does not set num_stages" in refused("import", *files)
    assert "Plan" not in run("import", *files, "--stages", "2")
    config.write_text("[]")
    assert "holds no JSON object" in refused("import", *files, "--stages", "2")
    assert "--stages is for --from deepspeed" in refused(
        "import", config, model_files[0], "--from", "megatron", "--stages", "2"
    )


def test_traces_are_shown_beside_what_was_predicted(plan_file, tmp_path):
    plan = pk.Plan.load(plan_file)
    slow = pk.simulate(plan.build_schedule(), plan.costs)
    paths = traced(slow, tmp_path)
    shown = run("trace", *paths, "--plan", plan_file, "-o", tmp_path / "timeline.json")
    assert "rank 0 │" in shown
    assert "predicted:" in shown
    assert pk.Timeline.load(tmp_path / "timeline.json").schedule.ranks == slow.schedule.ranks
    ranks = json.loads(run("trace", *paths, "--json"))["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert {"busy", "idle", "bubble", "waiting", "communication"} <= set(ranks[0])
    assert "show stage 3, but not 1" in refused("trace", paths[0])
    assert "penstock trace" in refused("draw", paths[0])


def test_plans_for_an_engine(model_files):
    shown = json.loads(run("plan", *model_files, "-m", "8", "--engine", "deepspeed", "--json"))
    assert shown["schedule"] == "1f1b"
