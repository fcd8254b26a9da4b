"""Pictures in the repository are what the code draws: those that follow from files beside them are
drawn again, and those of what was measured have at least today's style sheets."""

from __future__ import annotations

import html
import re

import pytest

from penstock.drawing.markup import resource
from tests.kit.command_line import run
from tests.kit.paths import DOCS, ROOT

IMAGES = DOCS / "images"
SHEETS = ("timeline", "plan", "chart", "contest", "fleet", "links", "versions")
STYLES = re.compile(r"<style>(.*?)</style>", re.DOTALL)
FIRST_SELECTORS = ("svg.", ".timeline .V{", ".timeline .v0{")
"""How our sheets begin; what one picture needs for itself stands in its code."""


def test_the_mesh(tmp_path):
    run("draw", IMAGES / "mesh.json", "-o", tmp_path / "mesh.svg")
    assert (tmp_path / "mesh.svg").read_text() == (IMAGES / "mesh.svg").read_text()


def test_a_fleet(tmp_path):
    """docs/many-models.md shows this command."""
    run("fleet", IMAGES / "fleet.toml", "--simulate", "-o", tmp_path / "fleet.svg")
    assert (tmp_path / "fleet.svg").read_text() == (IMAGES / "fleet.svg").read_text()


def test_a_spilled_step_and_its_memory(tmp_path):
    """docs/larger-than-memory.md shows these commands; the step was measured once."""
    step, plan = IMAGES / "spilled-step.json", IMAGES / "spilled.json"
    run("draw", step, "-o", tmp_path / "spilled-step.svg")
    run("compare", plan, step, "--memory", tmp_path / "memory.svg")
    for name in ("spilled-step.svg", "memory.svg"):
        assert (tmp_path / name).read_text() == (IMAGES / name).read_text()


@pytest.mark.parametrize("picture", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_the_style_sheets_of_a_picture_are_todays(picture):
    """If they are not: draw it again, or put the sheet of src/penstock/drawing in its place."""
    sheets = {resource(f"{name}.css") for name in SHEETS}
    found = [html.unescape(one) for one in STYLES.findall(picture.read_text())]
    ours = [one.strip() for one in found if one.strip().startswith(FIRST_SELECTORS)]
    assert ours
    assert [one for one in ours if one not in sheets] == []


def test_the_first_picture_of_the_readme_is_one_of_the_gallery():
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert pictures[0].startswith("docs/schedules/")
    assert all((ROOT / picture).exists() for picture in pictures)
