"""What the documents show is run here, so that it stays true."""

from __future__ import annotations

import doctest
import inspect
import itertools
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.core.schedule import families
from tests.docs.pages import ROOT, blocks_of
from tests.kit.helpers import make_plan


def python_block(page: str, number=0) -> str:
    """A Python block of a page."""
    return [block.text for block in blocks_of(page) if block.language == "python"][number]


def test_the_spine_in_the_docs_can_be_cut():
    namespace = {"nn": nn, "pk": pk}
    exec(python_block("docs/models.md", number=1), namespace)
    graph = pk.profile(namespace["Classifier"](), torch.randn(2, 16), repeats=1, ranks=0)
    assert [layer.name for layer in graph.layers] == [
        "embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head",
    ]  # fmt: skip


def test_the_skips_in_the_docs_cross_stages():
    namespace = {"nn": nn, "F": F, "torch": torch, "pk": pk}
    exec(python_block("docs/models.md", number=2), namespace)
    model, image = namespace["UNet"](), torch.randn(4, 3, 8, 8)
    with pk.Pipeline(model, make_plan(model, 3, 2), deadline_seconds=10) as pipeline:
        outputs = pipeline.evaluate(image)
    torch.testing.assert_close(outputs, model(image).detach())


def test_the_arguments_that_the_page_on_training_names_are_some():
    words = re.findall(r"`(\w+)=", (ROOT / "docs/training.md").read_text())
    arguments = inspect.signature(pk.Pipeline).parameters
    assert set(words) - {"update", "share", "timeout", "transport", "whole"} <= set(arguments)


def test_a_schedule_takes_one_file_and_one_line(monkeypatch):
    module = types.ModuleType("one_at_a_time")
    exec(python_block("docs/guides/add-a-schedule.md"), module.__dict__)
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
