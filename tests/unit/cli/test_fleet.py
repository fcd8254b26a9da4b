"""``penstock fleet``: predicted without torch, and trained."""

from __future__ import annotations

import json

import pytest

import penstock as pk
from tests.kit.command_line import refused, run, succeed
from tests.kit.helpers import make_mlp
from tests.kit.spilling import spilled_plan

FILE = """
[halving]
every = 2

[jobs.fits]
plan = "fits.json"
workload = "tests.kit.small_workload:workload"

[jobs.spilled]
plan = "spilled.json"
workload = "tests.kit.small_workload:workload"

[jobs.planned]
graph = "graph.json"
microbatches = 2
workload = "tests.kit.small_workload:workload"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    model = make_mlp()
    spilled_plan(model, spill=None).save(folder / "fits.json")
    spilled_plan(model).save(folder / "spilled.json")
    layers = tuple(
        pk.Layer(
            name=stage.layers[0],
            forward_seconds=1.0,
            backward_input_seconds=1.0,
            backward_weight_seconds=1.0,
        )
        for stage in spilled_plan(model).stages
    )
    pk.LayerGraph(layers=layers).save(folder / "graph.json")
    (folder / "fleet.toml").write_text(FILE)
    return folder


def test_simulated_beside_other_policies_and_the_bound(folder):
    file, picture = folder / "fleet.toml", folder / "chart.svg"
    text = run("fleet", file, "--simulate", "--devices", "3", "-o", picture)
    assert "longest" in text
    assert "whole" in text
    assert "bound: " in text
    assert "3 jobs on 3 devices, longest, predicted" in text
    assert "planned, step 3" in picture.read_text()
    numbers = json.loads(run("fleet", file, "--simulate", "--json", "--policy", "fair"))
    assert set(numbers["policies"]) == {"longest", "fair", "whole"}
    assert numbers["makespan"] == numbers["policies"]["fair"] >= numbers["bound"]
    # The profile's layers take three seconds each, for four steps of two microbatches.
    num_layers = len(make_mlp())
    assert numbers["jobs"]["planned"]["device_seconds"] == pytest.approx(4 * 2 * 3 * num_layers)


def test_trained_saved_and_gone_on_from(folder, tmp_path):
    file = tmp_path / "fleet.toml"
    text = FILE.replace('plan = "', f'plan = "{folder}/')
    text = text[: text.index("[jobs.planned]")]
    file.write_text(text)
    result = succeed("fleet", file, "--json", "--folder", tmp_path / "runs", "--every", "1")
    numbers = json.loads(result.stdout)
    jobs = numbers["jobs"]
    assert sorted(job["status"] for job in jobs.values()) == ["done", "stopped"]
    # Both train the same model on the same data.
    assert jobs["fits"]["losses"] == jobs["spilled"]["losses"]
    assert len(jobs["fits"]["losses"]) == 2
    assert "fits: done at step 2" in result.stderr
    again = succeed("fleet", file, "--folder", tmp_path / "runs")
    assert "fits     done" in again.stdout
    assert "idle" in again.stdout


def test_what_it_refuses(folder):
    (folder / "no-workload.toml").write_text('steps = 1\n[jobs.a]\nplan = "fits.json"\n')
    assert "job a has no workload" in refused("fleet", folder / "no-workload.toml")
    (folder / "epochs.toml").write_text('epochs = 1\n[jobs.a]\nplan = "fits.json"\n')
    assert "give steps to simulate" in refused("fleet", folder / "epochs.toml", "--simulate")
    two = spilled_plan(make_mlp(), spill=None, num_ranks=2, cuts=(2,))
    two.save(folder / "two.json")
    (folder / "two.toml").write_text('steps = 1\n[jobs.a]\nplan = "two.json"\n')
    assert "job a: the plan has 2 ranks" in refused("fleet", folder / "two.toml", "--simulate")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[jobs.a]\ngraph = "graph.json"\nmemory = 0', "jobs.a: memory is 0, but must be ≥ 1"),
        (
            '[jobs.a]\ngraph = "graph.json"\nmicrobatches = 1000000000',
            "job a: microbatches is 1000000000, but may be",
        ),
        (
            '[jobs.a]\ngraph = "graph.json"\nmicrobatches = 90000000',
            "job a: 90,000,000 microbatches on 1 rank are too many to plan",
        ),
        ('[jobs.a]\nplan = "missing.json"', "job a: cannot read"),
        ('[jobs.a]\nplan = "graph.json"', "holds a model's profile, where a plan is wanted"),
        ('[jobs."a/b"]\nplan = "fits.json"', "no job can be called 'a/b', since its folder"),
        ('[jobs.a]\nplan = "fits.json"\nsteps = 0', "jobs.a: steps is 0, but must be ≥ 1"),
    ],
)
def test_an_error_names_the_file_and_the_job(folder, text, message):
    file = folder / "wrong.toml"
    file.write_text(f"steps = 1\n{text}\n")
    told = refused("fleet", file, "--simulate")
    assert str(file) in told and message in told


@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_a_count_of_0_is_not_told_as_missing(folder, name):
    file = folder / "zero.toml"
    file.write_text(f'{name} = 0\n[jobs.a]\nplan = "fits.json"\n')
    assert f"{name} is 0, but must be ≥ 1" in refused("fleet", file, "--simulate")
