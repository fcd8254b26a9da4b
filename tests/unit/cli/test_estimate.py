"""``penstock estimate``, ``devices`` and ``measure-device``."""

from __future__ import annotations

import json

import pytest

import penstock as pk
from penstock.core import catalogue
from tests.kit.command_line import refused, run

WORKLOAD = "tests.kit.small_workload:workload"


def test_an_estimate_is_a_graph_as_a_profile_is(tmp_path):
    path = tmp_path / "graph.json"
    printed = run(
        "estimate", WORKLOAD, "-m", "4", "--device", "a100", "--sizes", "1", "-o", str(path)
    )
    graph = pk.LayerGraph.load(path)
    assert graph.estimate.device == "a100-sxm-80gb"
    assert graph.sizes == (1, 2)
    assert "not measured" in " ".join(printed.split())
    planned = run("plan", str(path), "-p", "2", "-m", "4")
    assert "estimated for a100-sxm-80gb" in " ".join(planned.split())


def test_a_plan_of_an_estimate_is_for_machines_of_the_catalogue(tmp_path):
    path = tmp_path / "graph.json"
    run("estimate", WORKLOAD, "-m", "4", "--device", "l40s", "-o", str(path))
    printed = " ".join(run("plan", str(path), "2xl40s", "-m", "4").split())
    assert "assumed to be one like rtx-4090-8" in printed
    assert "the cluster has" not in printed  # another device than that of the estimate
    said = refused("plan", str(path), "dgx-h10", "-m", "4")
    assert "no file 'dgx-h10'" in said and "the nearest are" in said and "dgx-h100" in said
    assert "is the name of a schedule" in refused("plan", str(path), "1f1b")


def test_machines_of_the_catalogue_are_a_cluster():
    shown = run("cluster", "2xdgx-h100")
    assert "host1" in shown
    made = json.loads(run("cluster", "2xdgx-h100", "--json"))
    assert len(made["devices"]) == 16


def test_a_host_is_shown_with_its_sources():
    printed = run("devices", "dgx-h100")
    assert "BasePOD" in printed and "from memory" in printed


def test_json_is_the_graph():
    printed = json.loads(run("estimate", WORKLOAD, "-m", "4", "--device", "h100", "--json"))
    assert printed["estimate"]["software"] == "eager"


def test_an_unknown_device_is_refused_with_the_nearest():
    assert "h100-pcie" in refused("estimate", WORKLOAD, "--device", "h100-nvl")


def test_the_catalogue_is_a_table_and_marks_what_has_no_source():
    printed = run("devices")
    assert all(name in printed for name in ("h100-sxm", "mi300x", "titan-x", "dgx-h100"))
    assert "900 GB/s?" in printed
    known = json.loads(run("devices", "--json"))
    assert len(known["devices"]) == len(catalogue.devices())


def test_a_device_is_shown_with_its_sources():
    printed = run("devices", "h100")
    assert "ml-engineering" in printed
    assert "NVIDIA" in printed or "H100" in printed


def test_this_machine_becomes_an_entry_from_which_one_estimates(tmp_path):
    path = tmp_path / "mine.toml"
    run("measure-device", "-o", str(path), "--name", "core", "--seconds", "0.001")
    entry = catalogue.device_named(str(path))
    assert entry.kind == "cpu"
    assert entry.peak("fp32").value > 1e9
    printed = json.loads(run("estimate", WORKLOAD, "-m", "4", "--device", str(path), "--json"))
    assert printed["estimate"]["device"] == "core"
    assert sum(layer["forward_seconds"] for layer in printed["layers"]) > 0


@pytest.mark.parametrize("arithmetic", ["tf32", "fp8"])
def test_arithmetic_that_a_device_lacks_is_refused(arithmetic):
    said = refused("estimate", WORKLOAD, "--device", "titan-x", "--arithmetic", arithmetic)
    assert f"computes no {arithmetic}" in said
