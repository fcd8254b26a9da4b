"""Parts of the pages of the gallery: templates, tables, lists and citations."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.core.schedule.about import About

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
_CITED = re.compile(
    r'"[^"]+",? (?:(?P<venue>[A-Z]\w*(?: \w+)*? \d{4}), )?arXiv (?P<number>[\d.]+\d)'
)


def filled(template: str, **values: str) -> str:
    """A template beside this file with its ``$names`` replaced."""
    text = (HERE / template).read_text(encoding="utf-8")
    return string.Template(text).substitute(values)


def percent(share: float) -> str:
    """A share between 0 and 1, for people."""
    return f"{points(share)} %"


def points(share: float) -> str:
    """The same, where a table's head says that its unit is %."""
    return f"{100 * max(share, 0):.1f}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int = 1) -> str:
    """A table whose first columns are texts and whose others are numbers."""
    rule = ["---" if at < num_texts else "--:" for at in range(len(columns))]
    cells = [columns, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def goes_on(text: str) -> str:
    """A sentence that begins within another."""
    return text[:1].lower() + text[1:]


def described(family: About, at_most: int) -> str:
    """The idea, the law, and the details where all of it has no more than so many words."""
    short = " ".join((family.summary, family.law))
    whole = " ".join((short, *family.details))
    return whole if len(whole.split()) <= at_most else short


def options(family: About) -> str:
    """A list of them, if there are any."""
    if not family.options:
        return ""
    lines = [
        f"- `{option.name}`{f', by default {option.default}' if option.default else ''}"
        f"{f': {option.meaning}' if option.meaning else ''}"
        for option in family.options
    ]
    return "\nOptions:\n\n{}\n".format("\n".join(lines))


def cited(citation: str) -> str:
    """Where it was published, as a link; a title only stands where there is none."""

    def linked(match: re.Match[str]) -> str:
        number = match["number"]
        return f"[{match['venue'] or f'arXiv {number}'}](https://arxiv.org/abs/{number})"

    return _CITED.sub(linked, citation)
