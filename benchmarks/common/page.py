"""Write ``docs/benchmarks.md``: the claims of ``benchmarks/page.md``, each with its kept figures.

    python -m benchmarks.common.page

A line ``{{ contest.memory }}`` of the claims stands for ``benchmarks/results/contest.memory.txt``:
its command, where and when it ran, and its tables. So no figure is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from benchmarks.common.alone import RESULTS

CLAIMS = Path(__file__).parents[1] / "page.md"
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
_FIELD = re.compile(r"\{\{ ([\w.]+) \}\}")


def page(claims: str, results: Path = RESULTS) -> str:
    """The page of some claims.

    Raises:
        FileNotFoundError: figures of a claim were never kept.
    """
    return "".join(f"{line}\n" for line in _lines(claims.splitlines(), results))


def _lines(claims: Iterable[str], results: Path) -> Iterator[str]:
    for line in claims:
        field = _FIELD.fullmatch(line)
        if field is None:
            yield line
        else:
            kept = (results / f"{field[1]}.txt").read_text(encoding="utf-8")
            yield from shown(kept.splitlines())


def shown(kept: list[str]) -> Iterator[str]:
    """Kept figures as Markdown: tables as they are, all other text as it was in the terminal."""
    command, surroundings, _, *output = kept
    yield from ("```console", command, "```", "", f"*{surroundings}*", "")
    for is_table, lines in groupby(output, lambda line: line.startswith("|")):
        text = [line.rstrip() for line in lines]
        if is_table:
            yield from text
        elif any(text):
            while not text[0]:
                del text[0]
            while not text[-1]:
                del text[-1]
            yield from ("", "```text", *text, "```", "")
        else:
            yield ""


if __name__ == "__main__":
    PAGE.write_text(page(CLAIMS.read_text(encoding="utf-8")), encoding="utf-8")
