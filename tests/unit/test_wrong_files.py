"""Files and options that are out of all reason: every verb answers with one message, soon, and says
``nan`` nowhere."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from click.testing import CliRunner

import penstock as pk
from penstock.base.errors import PenstockError
from penstock.cli import penstock

DEEP = 100_000
LAYER = {"forward_seconds": 1.0, "backward_input_seconds": 1.0, "backward_weight_seconds": 1.0}
GRAPH = {"layers": [{"name": "a", **LAYER, "output_bytes": 8}, {"name": "b", **LAYER}]}
CLUSTER = {"devices": [{"name": "x", "speed": 1.0}, {"name": "y"}], "link": {"latency_seconds": 0}}
TIMELINE = {"name": "", "source": "predicted", "num_ranks": 1, "spans": [["0F0", 0, 0.0, 1.0]]}
ODD = ("null", '"x"', "[]", "{}", "-1", "1e29", "1" + "0" * 29, "1e308", "1e-320", "1e400", "true")


def planned():
    graph = pk.LayerGraph.from_json(json.dumps(GRAPH))
    cluster = pk.Cluster.from_json(json.dumps(CLUSTER))
    made = pk.plan(graph, cluster, microbatches=4, schedule="1f1b", stages=2)
    return json.loads(made.to_json())


FILES = {
    "graph.json": (GRAPH, ("plan", "graph.json", "cluster.json")),
    "cluster.json": (CLUSTER, ("plan", "graph.json", "cluster.json")),
    "plan.json": (planned(), ("draw", "plan.json")),
    "timeline.json": (TIMELINE, ("draw", "timeline.json")),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, (content, _) in FILES.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def answered(*arguments):
    """What a verb prints; the message, if it refuses."""
    result = CliRunner().invoke(penstock, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, PenstockError), result.exception
        assert len(str(result.exception)) < 800
        return str(result.exception)
    assert result.exit_code in (0, 2)
    if result.exit_code == 0:
        assert not re.search(r"\b(nan|inf)\b", result.output)
    return result.output


def places(content, path=()):
    """The ways to every number in a file."""
    if isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, part in pairs:
            yield from places(part, (*path, key))
    elif isinstance(content, int | float):
        yield path


def replaced(content, path, text):
    changed = json.loads(json.dumps(content))
    part = changed
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = "HERE"
    return json.dumps(changed).replace('"HERE"', text)


@pytest.mark.parametrize("name", FILES)
def test_any_number_of_a_file_may_be_anything(folder, name):
    content, verb = FILES[name]
    told = {field: [] for field in {path[-1] for path in places(content)}}
    for path, text in itertools.product(places(content), ODD):
        if len(told[path[-1]]) < len(ODD):  # one place of each name is enough
            (folder / name).write_text(replaced(content, path, text))
            told[path[-1]].append(answered(*verb))
    assert all(any(name in answer for answer in answers) for answers in told.values())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("plan.json", '{"options": ' + '{"a":' * DEEP, "nested too deeply"),
        ("plan.json", '{"schedule": ' + "[" * DEEP, "holds neither|nested too deeply|not a valid"),
        ("timeline.json", '{"spans": ' + "[" * DEEP, "not a timeline|nested too deeply"),
        ("cluster.toml", "a = " + "[" * DEEP, "brackets in each other; write it flat"),
        ("cluster.toml", "a = " + "{a = " * DEEP, "brackets in each other; write it flat"),
        ("cluster.toml", "[[servers]]\ncount = 1000000000000", "count is 1000000000000, but may"),
        ("cluster.toml", "[[servers]]\ncount = 9999\ndevices = 9999", "devices is 99980001"),
        ("cluster.toml", "[[servers]]\n[[spares]]\nbandwidth = 1\ncount = 10000000000", "at most"),
        ("cluster.toml", "[[servers]]\nmemory = '1e40GiB'", "more memory than there is"),
        ("cluster.toml", "[[servers]]\nmemory = 1" + "0" * 400, "is not a size|out of range"),
        ("cluster.toml", "[[servers]]\nspeed = 1e-320", "speed is 1e-320"),
        ("timeline.json", json.dumps({**TIMELINE, "num_ranks": 10**12}), "num_ranks is 1"),
        ("timeline.json", json.dumps(TIMELINE).replace("0F0", "99999999999F0"), "its stage is 999"),
        ("timeline.json", json.dumps(TIMELINE).replace("1.0", "-1.0"), "ends at -1.0; give"),
    ],
)  # fmt: skip
def test_what_would_fill_the_memory_or_the_stack_is_refused(folder, name, text, message):
    (folder / name).write_text(text)
    verb = ("plan", "graph.json", name) if name.startswith("cluster") else ("draw", name)
    told = answered(*verb)
    assert re.search(message, told), told
    assert name in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "graph.json", "--replicas", "99999999999-1"), "num_devices is 100000000000, but"),
        (("plan", "graph.json", "--replicas", "9" * 5000), "are no replicas"),
        (("plan", "graph.json", "cluster.json", "--tensor", "²"), "is no number of devices"),
        (("plan", "graph.json", "--ranks", "1000000000000"), "num_devices is 1000000000000, but"),
        (
            ("plan", "graph.json", "cluster.json", "--what-if", "devices*1e15", "-m", "4"),
            "devices is 2000000000000000, but may be 100,000 at most",
        ),
        (("simulate", "1f1b", "--costs", "1e308,1e308,1e308"), "may be 1e[+]30 at most"),
        (("draw", "1f1b", "--costs", "1e-320,0,0"), "must be 0 or ≥ 1e-30"),
        (("simulate", "1f1b:replicas=" + "9" * 5000), "replicas is"),
        (("simulate", "zb-auto:effort=1e308"), "effort is 1e[+]308, but may be 10000 at most"),
        (("simulate", "hanayo:num_waves=9999", "-p", "999", "-m", "999"), "9999 parts are more"),
        (("report", "9" * 300), "cannot read 9999"),
        (("draw", "a\0.json"), "leave the null byte out"),
    ],
)
def test_options_out_of_all_reason_are_refused(folder, arguments, message):
    told = answered(*arguments)
    assert re.search(message, told), told


def test_costs_that_are_far_apart_can_still_be_drawn(folder):
    costs = ("--costs", "1e30,1e-30,1")
    answered("simulate", "1f1b", *costs)
    for picture in ("a.svg", "a.html"):
        assert "wrote" in answered("draw", "1f1b", *costs, "-o", picture)
        assert "nan" not in (folder / picture).read_text()
