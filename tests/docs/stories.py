"""Stories of a page: sections with models, what is said of them, and remedies."""

from __future__ import annotations

import linecache
import re
import warnings
from typing import NamedTuple

from tests.docs.pages import blocks_of

FILE = "model.py"
"""What errors call the file that a block of the page would stand in."""


class Step(NamedTuple):
    """A block of Python, and what the page shows as the error or warning that it gives."""

    code: str
    place: str
    said: str


def stories_of(page):
    """The steps of each section of a page, by its title; ``""`` for what comes before all."""
    stories = {"": []}
    title = ""
    for block in blocks_of(page):
        titles = [line for line in block.before.splitlines() if line.startswith("## ")]
        title = titles[-1].removeprefix("## ") if titles else title
        steps = stories.setdefault(title, [])
        if block.language == "python":
            steps.append(Step(block.text, block.place, ""))
        else:
            steps[-1] = steps[-1]._replace(said=block.text)
    return stories


def tell(step, namespace):
    """Run a block as if it were a file; gives what it says, or ``""`` if it just works."""
    lines = step.code.splitlines(keepends=True)
    linecache.cache[FILE] = (len(step.code), None, lines, FILE)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            exec(compile(step.code, FILE, "exec"), namespace)
        except ValueError as error:  # as all errors of Penstock about inputs are
            said = f"{type(error).__name__}: {error}"
            return re.sub(r"(modeling_\w+\.py):\d+", r"\1:675", said)  # of whatever version
        finally:
            del linecache.cache[FILE]
    ours = [warning for warning in warned if warning.filename == FILE]
    return "".join(f"{warning.category.__name__}: {warning.message}" for warning in ours)


def matches(shown, said):
    """Whether a page shows what was said: to the word, with ``…`` for what it leaves out."""
    parts = (re.escape(part) for part in " ".join(shown.split()).split("…"))
    return re.fullmatch(".*".join(parts), " ".join(said.split())) is not None
