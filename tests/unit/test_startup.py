"""What a start loads: whoever simulates a schedule waits for no planner, no picture and no torch.

Which modules are loaded is held, not how long that takes, so that any machine gives one answer.
"""

import ast
import importlib
import subprocess
import sys

import pytest

import penstock as pk
from penstock.cli import penstock
from penstock.drawing import Report, write_report
from tests.kit.paths import ROOT

HEAVY = (
    "importlib.abc",
    "numpy",
    "numpy.ma",
    "penstock.drawing.formats",
    "penstock.drawing.plan_svg",
    "penstock.drawing.report_page",
    "penstock.drawing.timeline.svg",
    "penstock.planning.partition.steady.search",
    "penstock.planning.planner.search",
    "penstock.planning.plans.plan",
    "penstock.training.rehearsal.conduct",
    "penstock.core.schedule.families",
    "penstock.core.summation.frames",
    "penstock.trial",
    "rich.progress",
    "rich.table",
    "scipy",
    "torch",
)
"""What takes long to load; each stands for what comes with it."""

TABLE = {"rich.table"}
SCHEDULE = {"numpy", "penstock.core.schedule.families"}  # a schedule is columns
PLAN = SCHEDULE | {"penstock.planning.plans.plan"}
PLANNED = PLAN | {
    "penstock.planning.partition.steady.search",
    "penstock.planning.planner.search",
}
PAGE = {"numpy", "penstock.drawing.report_page", "penstock.drawing.timeline.svg"}

MAY_LOAD = {
    "--help": SCHEDULE,
    "nonsense": set(),
    "schedules": SCHEDULE | TABLE,
    "simulate 1f1b": SCHEDULE | TABLE,
    "simulate 1f1b --json": SCHEDULE,
    "simulate plan.json --json": PLAN,
    "check 1f1b": SCHEDULE,
    "draw 1f1b": SCHEDULE | {"penstock.drawing.formats"},
    "draw plan.json": PLAN | {"penstock.drawing.formats"},
    "compare 1f1b gpipe": SCHEDULE | TABLE,
    "cluster -p 2": TABLE,
    "devices": TABLE,
    "devices h100": TABLE,
    "plan graph.json -p 2 -m 4 --schedule 1f1b": PLANNED | TABLE,
    "explain plan.json": PLAN | TABLE,
    "explain plan.json --json": PLAN,
    "export plan.json --to torchtitan": PLAN,
    "fleet fleet.toml --simulate --json": PLAN,
    "import train.sh graph.json --from deepspeed": PLANNED | TABLE,
    "trace rank0.json --json": SCHEDULE,
    "report run": PAGE | TABLE,
    "serve --listen 0.0.0.0": {"penstock.core.summation.frames"},  # refused without a secret
}
NEED_TORCH = {
    *("checkpoint", "contest", "demo", "estimate", "measure-cluster", "measure-device"),
    "profile",
    *("rehearse", "run", "train", "verify"),
}

AT_THE_END = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With all the files that verbs read."""
    folder = tmp_path_factory.mktemp("startup")
    seconds = {"forward_seconds": 1, "backward_input_seconds": 1, "backward_weight_seconds": 1}
    graph = pk.LayerGraph(layers=tuple(pk.Layer(name=name, **seconds) for name in "abcd"))
    graph.save(folder / "graph.json")
    plan = pk.plan(graph, pk.Cluster.local(2), microbatches=4, schedule="1f1b", stages=2)
    plan.save(folder / "plan.json")
    pk.plan(graph, pk.Cluster.local(1), microbatches=4).save(folder / "one.json")
    (folder / "fleet.toml").write_text('steps = 2\n[jobs.a]\nplan = "one.json"\n')
    (folder / "train.sh").write_text('{"num_stages": 2}')
    pk.draw(pk.simulate(plan), folder / "rank0.json")
    write_report(Report(title="a run", facts=()), folder / "run")
    return folder


def loaded(code, folder):
    """The modules that a program has loaded when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END + code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return set(done.stderr.splitlines()[-1].split())


def test_the_package_alone_loads_nothing(tmp_path):
    modules = loaded("import penstock", tmp_path)
    assert {name for name in modules if name.startswith("penstock")} == {
        "penstock",
        "penstock.base",
        "penstock.base.lazily",
    }
    assert not modules & {"click", "dataclasses", "msgspec", *HEAVY}


@pytest.mark.parametrize("words", MAY_LOAD)
def test_a_verb_loads_what_it_needs_and_no_more(words, folder):
    start = f"sys.argv = ['penstock', *{words.split()!r}]\nfrom penstock.cli import main\nmain()"
    assert loaded(start, folder) & set(HEAVY) <= MAY_LOAD[words]


def test_every_verb_is_held_to_it_or_needs_torch():
    held = {words.split()[0] for words in MAY_LOAD} - {"--help", "nonsense"}
    assert held | NEED_TORCH == set(penstock.commands)
    assert all(name == command.name for name, command in penstock.commands.items())


def test_a_pipeline_loads_no_planner_and_no_picture(tmp_path):
    modules = loaded("import penstock.training.pipeline", tmp_path)
    pictures = {name for name in modules if name.startswith("penstock.drawing.timeline")}
    assert not pictures | (
        modules & {"penstock.planning.planner", "penstock.planning.partition", "rich", "click"}
    )
    # torch's compiler comes with the first optimizer or layer, not with us.
    assert "torch" in modules and "torch._dynamo" not in modules


ROOMS = sorted((ROOT / "src" / "penstock").rglob("__init__.py"))
LAZY = [path.parent for path in ROOMS if "loaded_when_used" in path.read_text()]


@pytest.mark.parametrize("room", LAZY, ids=lambda room: room.name)
def test_a_room_loads_the_names_that_it_declares(room):
    """What readers and type checkers are told stands where the name is loaded from."""
    package = importlib.import_module(".".join(room.relative_to(ROOT / "src").parts))
    tree = ast.parse((room / "__init__.py").read_text())
    (told,) = (node for node in tree.body if isinstance(node, ast.If) and _is_told(node.test))
    imports = [node for node in told.body if isinstance(node, ast.ImportFrom)]
    aliases = [(node.module, alias) for node in imports for alias in node.names]
    places = {alias.asname or alias.name: (module, alias) for module, alias in aliases}
    assert set(places) == set(package.__all__)
    for name, (module, alias) in places.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), alias.name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = package.nonsense


def _is_told(test):
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
