"""Every story of docs/models-that-do-not-trace.md: the error is as printed, the remedy works."""

from __future__ import annotations

import pytest

from tests.docs.stories import stories_of, tell

PAGE = "docs/models-that-do-not-trace.md"
STORIES = stories_of(PAGE)
pytestmark = pytest.mark.xdist_group("capture")  # loading torch.export takes longest


def _marks(steps):
    # Of torch's, unit/tracing/test_capture.py has a quick one.
    slow = any("ransformer" in step.code for step in steps)
    return [pytest.mark.soak] if slow else []


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=_marks(steps)) for title, steps in STORIES.items() if title]
)
def test_a_story_is_as_it_is_told(title):
    namespace = {"__name__": "model"}
    for step in STORIES[""]:
        assert not tell(step, namespace)
    for step in STORIES[title]:
        assert tell(step, namespace).split() == step.said.split(), step.place


def test_nearly_every_story_says_something():
    silent = [title for title, steps in STORIES.items() if not any(step.said for step in steps)]
    assert silent == ["", "What works as it is"]
