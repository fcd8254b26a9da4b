"""Every block of every page runs, from top to bottom, in a folder that has what a clone has."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest

import penstock as pk
from penstock.engine.tracing import entrance
from penstock.training.estimating import measured_device
from penstock.training.estimating.microbenchmarks import all_points
from tests.docs.pages import QUICK_PROFILE, blocks_of, run_page
from tests.kit.paths import DOCS, ROOT

ELSEWHERE = {
    "docs/guides/add-a-schedule.md": "docs/test_docs.py",
    "docs/asynchronous.md": "docs/test_gallery.py",
    "docs/huggingface.md": "unit/interop/test_huggingface.py",
    "docs/learned-placement.md": "unit/partition/test_learned_placement.py",
    "docs/models-that-do-not-trace.md": "docs/test_models_that_do_not_trace.py",
    "docs/models.md": "numerics/test_captured_models.py",
    "docs/lightning.md": "unit/interop/test_lightning.py",
    "docs/planning.md": "docs/test_planning_docs.py",
}
"""Pages whose tests run their blocks and look at what comes out."""
SHOWN = ("", "text", "bibtex", "mermaid", "py")
"""Languages of blocks that nobody runs; ``py`` is for other libraries' Python."""
MADE = ("schedules", "versions")
"""Folders of pages that are made; they have tests of their own."""


def pages():
    """Pages with something to run."""
    written = [path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in MADE]
    candidates = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(written)]
    named = [str(path.relative_to(ROOT)) for path in candidates]
    return [
        page
        for page in named
        if any(block.language not in SHOWN for block in blocks_of(page)) and page not in ELSEWHERE
    ]


@pytest.fixture
def few_points(monkeypatch):
    """A device is measured by two calls of each kind; with all, in unit/cli/test_estimate.py."""

    def points():
        by_kind = defaultdict(list)
        for point in all_points():
            by_kind[point.kind].append(point)
        return [point for of_kind in by_kind.values() for point in of_kind[:2]]

    monkeypatch.setattr(measured_device, "all_points", points)


@pytest.fixture
def traced_once(monkeypatch):
    """A model that a page estimates for one device after another is the same each time."""
    known, trace = {}, entrance.traced_on_meta

    def traced(model, inputs, granularity):
        asked = id(model), id(inputs), granularity
        if asked not in known:
            # The model and its inputs are kept, so that no others get their numbers.
            known[asked] = model, inputs, trace(model, inputs, granularity)
        return known[asked][-1]

    monkeypatch.setattr(entrance, "traced_on_meta", traced)


@pytest.mark.parametrize("page", pages())
@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.usefixtures("small_demo", "few_points", "rehearsed_in_threads", "traced_once")
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pk, "profile", partial(pk.profile, **QUICK_PROFILE))
    for shared in ("examples", "tests", "docs"):
        (tmp_path / shared).symlink_to(ROOT / shared)
    names = {}
    if "(setup.md)" in (ROOT / page).read_text():
        run_page("docs/setup.md", names)
    run_page(page, names)


def test_pages_that_are_tested_elsewhere_are():
    for page, test in ELSEWHERE.items():
        assert (ROOT / page).exists()
        assert page.rsplit("/", 1)[-1] in (ROOT / "tests" / test).read_text()
