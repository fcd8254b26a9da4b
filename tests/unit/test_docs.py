"""What the documents show is run here, so that it stays true."""

from __future__ import annotations

import doctest
import inspect
import itertools
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.schedule import families
from tests.helpers import make_plan

ROOT = Path(__file__).parents[2]


def python_block(page: str, at=0) -> str:
    """A Python block of a page."""
    text = (ROOT / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[at]


def test_the_script_in_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)]
    batch = (torch.randn(16, 64), torch.randint(0, 5, (16,)))
    namespace = {
        "build_model": lambda: nn.Sequential(*layers),
        "loader": itertools.repeat(batch, 5),
    }
    script = python_block("README.md")
    assert len(script.splitlines()) <= 15
    exec(script, namespace)
    assert "predicted" in capsys.readouterr().out
    assert float(namespace["loss"]) > 0
    assert (tmp_path / "measured.svg").read_text().startswith("<svg")


def test_the_spine_in_the_docs_can_be_cut():
    namespace = {"nn": nn}
    exec(python_block("docs/models.md"), namespace)
    graph = pk.profile(namespace["Classifier"](), torch.randn(2, 16), repeats=1)
    assert [layer.name for layer in graph.layers] == [
        "embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head",
    ]  # fmt: skip


def test_the_skips_in_the_docs_cross_stages():
    namespace = {"nn": nn, "F": F, "torch": torch, "pk": pk}
    exec(python_block("docs/models.md", at=1), namespace)
    model, image = namespace["UNet"](), torch.randn(4, 3, 8, 8)
    with pk.Pipeline(model, make_plan(model, 3, 2), deadline_seconds=10) as pipeline:
        outputs = pipeline.evaluate(image)
    torch.testing.assert_close(outputs, model(image).detach())


def test_the_training_in_the_docs_runs(capsys, tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = (torch.randn(8, 6), torch.randint(0, 3, (8,)))
    namespace = {
        "torch": torch, "F": F, "pk": pk, "model": model, "plan": make_plan(model, 2, 4),
        "loader": [batch] * 3, "held_out": batch[0],
    }  # fmt: skip
    exec(python_block("docs/training.md"), namespace)
    assert namespace["outputs"].shape == (8, 3)
    assert "tensor" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    exec(python_block("docs/training.md", at=2), namespace)
    model.load_state_dict(torch.load("weights.pt", weights_only=True))
    # Every argument that the page names is one.
    words = re.findall(r"`(\w+)=", (ROOT / "docs/training.md").read_text())
    arguments = inspect.signature(pk.Pipeline).parameters
    assert set(words) - {"update", "share", "transport", "whole"} <= set(arguments)


def test_a_schedule_takes_one_file_and_one_line(monkeypatch):
    module = types.ModuleType("one_at_a_time")
    exec(python_block("docs/add-a-schedule.md"), module.__dict__)
    monkeypatch.setitem(sys.modules, "one_at_a_time", module)
    module.one_at_a_time.__module__ = "one_at_a_time"
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
    monkeypatch.setitem(families.FAMILIES, "one-at-a-time", module.one_at_a_time)
    for num_ranks, num_microbatches in itertools.product((1, 2, 5), (1, 4)):
        pk.check(
            pk.schedules.build(
                "one-at-a-time", num_ranks=num_ranks, num_microbatches=num_microbatches
            )
        )


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "docs/models.md",
        "docs/planning.md",
        "docs/training.md",
    ],
)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
