"""``penstock profile``: the table, other sizes, the file."""

from __future__ import annotations

import json

import pytest

import penstock as pk
from penstock.base.errors import InputError
from tests.kit.command_line import refused, run
from tests.kit.small_workload import workload

WORKLOAD = "tests.kit.small_workload:workload"


def test_the_table_has_a_line_per_layer_their_sum_and_the_conditions(tmp_path):
    path = tmp_path / "graph.json"
    told = run(
        "profile", WORKLOAD, "-m", "4", "--repeats", "1", "--sizes", "1,4", "--patience", "1",
        "-o", str(path), "-v",
    )  # fmt: skip
    graph = pk.LayerGraph.load(path)
    lines = told.splitlines()
    for word in ("F ms", "split ms", "R ms", "±", "kept MiB", "weights MiB", "flags"):
        assert word in lines[0]
    assert [line.split()[0] for line in lines[1:8]] == [*"012345", "all"]
    assert "2 rows, float32" in told
    assert "with 1 rows: F + B" in told and "with 4 rows: F + B" in told
    assert (graph.microbatch_size, graph.sizes) == (2, (1, 2, 4))
    for warned in (graph, *graph.layers):
        for warning in warned.warnings:
            assert f"! {warning}" in told
    assert str(graph.contention) in told and " ± " in str(graph.contention)


def test_json_is_the_graph():
    found = json.loads(run("profile", WORKLOAD, "-m", "4", "--repeats", "1", "--json"))
    assert len(found["layers"]) == 6
    assert found["other_sizes"] == []


def test_no_pipeline_need_be_run():
    told = run("profile", WORKLOAD, "--repeats", "1", "--ranks", "0", "--json")
    assert json.loads(told)["contention"]["num_ranks"] == 0
    assert "cost each other was not measured" in run(
        "profile", WORKLOAD, "--repeats", "1", "--ranks", "0"
    )


def test_sizes_are_numbers_of_rows_that_there_are():
    assert "are no sizes" in refused("profile", WORKLOAD, "--sizes", "a,b")
    message = "a minibatch of 8 rows has no microbatch of 9; ask for at most 8"
    assert message in refused("profile", WORKLOAD, "--sizes", "2,9")


def test_sizes_may_be_larger_than_the_workloads_own():
    graph = workload().profile(4, repeats=1, sizes=[8], ranks=0)
    assert (graph.microbatch_size, graph.sizes) == (2, (2, 8))
    assert graph.at(8).input_bytes == 4 * graph.input_bytes
    with pytest.raises(InputError, match="rows cannot be taken"):
        workload().profile(4, repeats=1, sizes=[0])


def test_without_details_the_table_has_what_plans_are_made_of(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    told = run("profile", WORKLOAD, "--repeats", "1", "--ranks", "0")
    head = told.splitlines()[0]
    assert "F ms" in head and "weights MiB" in head and "split ms" not in told
    assert "an op takes" not in told
    # A line of standard error may stand between; no layer has so long a name.
    assert max(map(len, told.splitlines())) <= 80
