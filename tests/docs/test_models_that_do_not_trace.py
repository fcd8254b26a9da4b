"""Every story of docs/models-that-do-not-trace.md: the error is as printed, the remedy works.

What its table says in a line stands as a story in untraceable_models.md, beside this file.
"""

from __future__ import annotations

import re

import pytest

from tests.docs.stories import matches, stories_of, tell
from tests.kit.paths import ROOT

PAGE = "docs/models-that-do-not-trace.md"
MORE = "tests/docs/untraceable_models.md"
STORIES = {page: stories_of(page) for page in (PAGE, MORE)}
WORKS = "What works as it is"
pytestmark = pytest.mark.xdist_group("capture")  # loading torch.export takes longest


def _marks(steps):
    # Of torch's, unit/tracing/test_captured.py has a quick one.
    slow = any("ransformer" in step.code for step in steps)
    return [pytest.mark.soak] if slow else []


@pytest.mark.parametrize(
    ("page", "title"),
    [
        pytest.param(page, title, marks=_marks(steps))
        for page, stories in STORIES.items()
        for title, steps in stories.items()
        if title
    ],
)
def test_a_story_is_as_it_is_told(page, title):
    namespace = {"__name__": "model"}
    for step in STORIES[page][""]:
        assert not tell(step, namespace)
    for step in STORIES[page][title]:
        assert matches(step.said, tell(step, namespace)), step.place


def test_every_story_but_one_says_something():
    silent = [
        title
        for stories in STORIES.values()
        for title, steps in stories.items()
        if title and not any(step.said for step in steps)
    ]
    assert silent == [WORKS]


def test_every_error_of_the_table_is_that_of_a_story():
    said = " ".join(
        step.said for stories in STORIES.values() for steps in stories.values() for step in steps
    )
    said = " ".join(said.split())
    rows = re.findall(r"^\| .* \| `([^|]+)`.* \| .* \|$", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert len(rows) > 12
    for error in rows:
        assert error in said, error
