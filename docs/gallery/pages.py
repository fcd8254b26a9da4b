"""What the pages of the gallery are made of: templates, tables, lists and citations."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.schedule.about import About

HERE = Path(__file__).parent


def filled(template: str, **values: str) -> str:
    """A template beside this file with its ``$names`` replaced."""
    text = (HERE / template).read_text(encoding="utf-8")
    return string.Template(text).substitute(values)


def percent(share: float) -> str:
    """A share between 0 and 1, for people."""
    return f"{100 * max(share, 0):.1f} %"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int = 1) -> str:
    """A table whose first columns are texts and whose others are numbers."""
    rule = ["---" if at < num_texts else "--:" for at in range(len(columns))]
    cells = [columns, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def paragraphs(texts: Iterable[str]) -> str:
    """One after the other, each behind an empty line."""
    return "".join(f"\n{text}\n" for text in texts)


def options(one: About) -> str:
    """A section of its own, if there are any."""
    if not one.options:
        return ""
    lines = [
        f"- `{option.name}`{f', by default {option.default}' if option.default else ''}"
        f"{f': {option.meaning}' if option.meaning else ''}"
        for option in one.options
    ]
    listed = "\n".join(lines)
    return f"\n## Options\n\n{listed}\n"


def linked(citation: str) -> str:
    """With links to arXiv."""
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", citation)


def bibtex(one: About) -> str:
    """Entries for all papers that are cited with their title."""
    entries = "\n\n".join(paper.bibtex() for paper in one.papers)
    return f"\n```bibtex\n{entries}\n```\n" if entries else ""
