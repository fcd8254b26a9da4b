"""``-`` is standard input wherever a file is read."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from penstock.base.errors import PenstockError
from penstock.cli import penstock as program
from penstock.core.cluster import Cluster
from tests.kit.command_line import run
from tests.kit.paths import DOCS, ROOT

PLAN = DOCS / "images" / "plan.json"
GRAPH = ROOT / "tests" / "data" / "pipedream" / "vgg16" / "graph.txt"
FLEET = DOCS / "images" / "fleet.toml"
CLUSTER = ROOT / "examples" / "cluster.toml"


def piped(text, *words):
    return CliRunner().invoke(program, [*map(str, words)], input=text)


def told(text, *words):
    result = piped(text, *words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.mark.parametrize("verb", ["draw", "simulate", "compare", "check", "explain"])
def test_a_plan(verb):
    assert told(PLAN.read_text(), verb, "-") == run(verb, PLAN)


def test_ops_as_torch_writes_them(tmp_path):
    ops = (ROOT / "examples" / "schedule.csv").read_text()
    assert told(ops, "check", "-") == run("check", ROOT / "examples" / "schedule.csv")
    assert "standard input" in told(ops, "draw", "-").splitlines()[0]


def test_a_graph_of_pipedreams_and_one_of_ours(tmp_path):
    words = ("-p", 2, "-m", 4, "--schedule", "1f1b", "--stages", 2, "--json")
    assert told(GRAPH.read_text(), "plan", "-", *words) == run("plan", GRAPH, *words)
    from penstock.interop.pipedream_profiles import read_pipedream_graph

    read_pipedream_graph(GRAPH).save(tmp_path / "graph.json")
    ours = (tmp_path / "graph.json").read_text()
    assert told(ours, "plan", "-", *words) == run("plan", GRAPH, *words)


def test_a_cluster_in_both_forms():
    assert told(CLUSTER.read_text(), "cluster", "-") == run("cluster", CLUSTER)
    as_json = Cluster.load(CLUSTER).to_json()
    assert told(as_json, "cluster", "-") == run("cluster", CLUSTER)


def test_a_fleet_finds_its_files_from_here(monkeypatch):
    monkeypatch.chdir(FLEET.parent)
    words = ("--simulate", "--json")
    assert told(FLEET.read_text(), "fleet", "-", *words) == run("fleet", FLEET, *words)


def test_costs():
    costs = json.dumps({"forward": 2.0})
    by_hand = run("simulate", "1f1b", "--costs", "2,1,1", "--json")
    assert told(costs, "simulate", "1f1b", "--costs", "-", "--json") == by_hand


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "-", "-"),
        ("plan", "-", "-"),
    ],
)
def test_it_is_read_once(words):
    result = piped(PLAN.read_text(), *words)
    assert result.exit_code == 2
    assert "- is standard input, which can be read once" in result.output


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("", ("draw", "-"), "standard input is empty"),
        ("{}", ("draw", "-"), "standard input holds neither a plan nor"),
        (
            '{"layers": []}',
            ("explain", "-"),
            "standard input holds a model's profile, where a plan is wanted",
        ),
        ("0F0,1F0\n0X0", ("check", "-"), "standard input"),
        (PLAN.read_text(), ("draw", "-", "-p", "2"), "standard input says its ranks"),
        ("x = 1", ("fleet", "-", "--simulate"), "standard input is not a valid fleet"),
        ("link = 3", ("cluster", "-"), "standard input is not a valid Cluster"),
    ],
)
def test_what_is_wrong_is_said_of_it(text, words, said):
    result = piped(text, *words)
    assert isinstance(result.exception, PenstockError)
    assert said in str(result.exception)


def test_bytes_that_are_no_text():
    result = CliRunner().invoke(program, ["draw", "-"], input=b"\xff\xfe\x00{")
    assert "cannot read standard input: it is not UTF-8 text" in str(result.exception)
