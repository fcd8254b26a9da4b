"""What the documents show is run here, so that it stays true."""

from __future__ import annotations

import doctest
import itertools
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as pk
from penstock.schedule import families

ROOT = Path(__file__).parents[2]


def python_block(page: str) -> str:
    """The first Python block of a page."""
    text = (ROOT / page).read_text()
    return re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]


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
    "page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/models.md"]
)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
