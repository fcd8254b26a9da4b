"""``docs/model-zoo.md``: what its script gives, and that it tells of every model."""

from __future__ import annotations

import inspect
import re

import pytest

from tests.kit.paths import ROOT

DOCS = ROOT / "docs"


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gallery"))
    import zoo

    return zoo


def test_a_model_is_planned_trained_and_drawn(zoo, tmp_path):
    result = zoo.trained("vgg", 1, 2)
    assert result.published == 138_357_544
    assert len(result.plan.stages) == zoo.DEVICES
    assert result.ours == result.theirs
    zoo.write([result], 1, tmp_path)
    page = (tmp_path / "model-zoo.md").read_text()
    assert "| [VGG-16](#vgg) | 138.4 M | 15 k | 39 |" in page
    assert f"Stages begin at `{result.plan.stages[1].layers[0]}`" in page
    assert (tmp_path / "images" / "zoo" / "vgg.svg").read_text().startswith("<svg")


def test_the_page_tells_of_every_model_as_its_module_does(zoo):
    page = (DOCS / "model-zoo.md").read_text()
    words = " ".join(page.replace("`", "").split())
    for name in zoo.NAMES:
        module = ROOT / "examples" / "models" / f"{name}.py"
        assert f"](images/zoo/{name}.svg)" in page
        assert (DOCS / "images" / "zoo" / f"{name}.svg").exists()
        title, told = inspect.cleandoc(module.read_text().split('"""')[1]).split("\n", 1)
        last = " ".join(told.replace("`", "").split())[-80:]
        assert last in words, f"{name}: run tools/gallery/zoo.py"
        assert f"[{re.split('[:,.]', title)[0]}](#" in page


def test_the_page_is_what_the_template_says(zoo):
    page = (DOCS / "model-zoo.md").read_text()
    template = (ROOT / "tools" / "gallery" / "model-zoo.md").read_text()
    assert page.startswith(template[: template.index("## What they give")])
