"""The notebooks of ``examples/`` run from the first cell to the last, and show what they should."""

import ast
import importlib
import json

import pytest

from tests.kit.paths import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
IN_CI = "schedules_compared"
"""The one that needs no torch is run everywhere; the others take a kernel and seconds each."""


def test_there_are_notebooks():
    assert IN_CI in [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    for cell in json.loads(path.read_text())["cells"]:
        assert cell["metadata"] == {}
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_name_that_a_notebook_takes_from_a_module_exists(path):
    """Its cells run in ``make soak`` only, so what was renamed must be noticed here."""
    cells = json.loads(path.read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    nodes = [*ast.walk(ast.parse(source))]
    names = [
        (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    names += [
        ("penstock", node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pk"
    ]
    modules = {module: importlib.import_module(module) for module, _ in names}
    missing = [f"{module}.{name}" for module, name in names if not hasattr(modules[module], name)]
    assert missing == []


@pytest.mark.filterwarnings("default")  # of the kernel's own libraries
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem == IN_CI else pytest.mark.soak)
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_every_cell_of_a_notebook_runs(path, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [
        output.data["text/html"]
        for cell in cells
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]
    assert sum("data:image/svg+xml" in html for html in shown) >= 3
    errors = [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert errors == []
    if path.stem == IN_CI:
        assert (tmp_path / "zb-h1.svg").exists()
