"""ARCHITECTURE.md is true: every room stands in it, every file it names exists, its laws hold."""

import ast
import re

import pytest

import penstock
from tests.kit.paths import ROOT

MAP = (ROOT / "ARCHITECTURE.md").read_text()
SOURCES = sorted((ROOT / "src" / "penstock").rglob("*.py"))
PACKAGE = ROOT / "src" / "penstock"
WINGS = sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
MANY_ROOMS = ("core", "planning", "engine", "training")
ROOMS = sorted(
    path.stem
    for wing in MANY_ROOMS
    for path in (PACKAGE / wing).iterdir()
    if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem != "__init__")
)


def test_the_root_shows_wings_and_nothing_else():
    shown = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert shown == {*(wing.name for wing in WINGS), "__init__.py", "__main__.py", "py.typed"}
    assert all(f"`{wing.name}`" in MAP for wing in WINGS)


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_stands_in_the_map(room):
    assert f"`{room}`" in MAP


def test_every_place_that_the_map_names_exists():
    places = set(re.findall(r"`([a-z_/]+(?:/|\.py|\.md))`", MAP)) | set(
        re.findall(r"\]\(([^)]+)\)", MAP)
    )
    assert len(places) > 20
    within = [
        ROOT,
        ROOT / "src",
        PACKAGE,
        *WINGS,
        *(PACKAGE / "core").iterdir(),
        PACKAGE / "engine" / "run",
        PACKAGE / "trial",
    ]
    missing = [place for place in places if not any((base / place).exists() for base in within)]
    assert not missing


@pytest.mark.parametrize(
    "package", [path for path in SOURCES if path.name == "__init__.py"], ids=lambda p: p.parent.name
)
def test_every_room_says_what_it_is_for(package):
    assert ast.get_docstring(ast.parse(package.read_text()))


def test_no_module_keeps_ambient_state():
    """No ``global``, and no container of a module that its functions change. Two files keep account
    of what torch itself keeps for the whole process, and one what the package provides to its lower
    rooms; the map names them."""
    offenders = []
    keeping = [PACKAGE / file for file in re.findall(r"`([\w/]+\.py)`", _law(4))]
    assert len(keeping) == 3
    for path in (path for path in SOURCES if path not in keeping):
        tree = ast.parse(path.read_text())
        offenders += [
            f"{path.name}:{node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Global)
        ]
        offenders += [f"{path.name}:{line}" for line in _changed_in_functions(tree)]
    assert not offenders


def _law(number: int) -> str:
    return re.search(rf"^{number}\. .*?(?=^\d\. |^## )", MAP, re.M | re.S)[0]


def _changed_in_functions(tree: ast.Module):
    """The lines at which a function writes into a container of its module."""
    containers = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    changing = {"append", "add", "update", "setdefault", "pop", "clear", "extend", "remove"}
    if not containers:
        return
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    for function in functions:
        nodes = list(ast.walk(function))
        local = {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        } | {argument.arg for argument in nodes if isinstance(argument, ast.arg)}
        of_module = containers - local
        for node in nodes:
            value = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                value = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                value = node.func.value if node.func.attr in changing else None
            if isinstance(value, ast.Name) and value.id in of_module:
                yield node.lineno


def test_no_module_has_the_name_of_a_public_function():
    """Importing it would put the module in the place of the function."""
    functions = {name for name in penstock.__all__ if callable(getattr(penstock, name))}
    beside = {room.rstrip("/").removesuffix(".py") for room in ROOMS}
    assert not functions & beside


def test_no_room_but_device_names_a_kind_of_accelerator():
    """What holds for one kind only stands in ``device``; one file asks NVIDIA's driver."""
    inside = ROOT / "src" / "penstock"
    allowed = {
        *(inside / "engine" / "device").rglob("*.py"),
        inside / "core" / "cluster" / "local.py",
        inside / "training" / "pipeline" / "habits.py",  # has the names of a module's methods
    }
    names = re.compile(r"\b(cuda|nccl|nvidia|rocm|xpu|npu|mps)\b", re.I)
    offenders = [
        f"{path.relative_to(inside)}: {line.strip()}"
        for path in SOURCES
        if path not in allowed
        for line in path.read_text().splitlines()
        if names.search(line)
    ]
    assert not offenders
