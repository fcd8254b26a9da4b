"""Write ``docs/benchmarks.md``: the claims of ``benchmarks/page.md``, each with its kept figures.

    python -m benchmarks.common.page

A line ``{{ contest.memory }}`` of the claims stands for ``benchmarks/results/contest.memory.txt``:
its command, where and when it ran, and its tables. ``{{ demo / speed-up|loss }}`` stands for the
lines of it in which that is found. So no figure is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from benchmarks.common.alone import RESULTS

CLAIMS = Path(__file__).parents[1] / "page.md"
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
_FIELD = re.compile(r"\{\{ ([\w.]+)(?: / (.+))? \}\}")
_BOX = re.compile("[┃│]")
_EDGE = re.compile("^[┏┡┗└├┌╭╰]")


def page(claims: str, results: Path = RESULTS) -> str:
    """The page of some claims.

    Raises:
        FileNotFoundError: figures of a claim were never kept.
    """
    return "".join(f"{line}\n" for line in _lines(claims.splitlines(), results))


def _lines(claims: Iterable[str], results: Path) -> Iterator[str]:
    ends_blank = False  # what is shown ends with an empty line of its own
    for line in claims:
        field = _FIELD.fullmatch(line)
        if field is None:
            if line or not ends_blank:
                yield line
            ends_blank = False
        else:
            ends_blank = True
            kept = (results / f"{field[1]}.txt").read_text(encoding="utf-8")
            yield from shown(kept.splitlines(), field[2] or "")


def shown(kept: list[str], only: str = "") -> Iterator[str]:
    """Kept figures as Markdown: tables as tables, all other text as it was in the terminal.

    Args:
        kept: the lines of the file.
        only: a pattern; what is shown are the lines in which it is found, below the heads of
            tables.
    """
    command, surroundings, _, *output = kept
    yield from ("```console", command, "```", "", f"*{surroundings}*", "")
    for is_table, lines in groupby(_without_boxes(output), lambda line: line.startswith("|")):
        head, body = _parted([line.rstrip() for line in lines], is_table)
        text = [line for line in body if re.search(only, line)]
        if is_table and text:
            yield from (*head, *text, "")
        elif any(text):
            while not text[0]:
                del text[0]
            while not text[-1]:
                del text[-1]
            yield from ("```text", *text, "```", "")


def _parted(lines: list[str], is_table: bool) -> tuple[list[str], list[str]]:
    """The head of a table, and its rows."""
    return (lines[:2], lines[2:]) if is_table else ([], lines)


def _without_boxes(output: Iterable[str]) -> Iterator[str]:
    """Tables that were drawn with lines, as Markdown has them."""
    heads: list[list[str]] = []  # a head may have several lines
    for line in output:
        cells = [cell.strip() for cell in _BOX.split(line)[1:-1]] if _BOX.match(line) else []
        if line.startswith("┃"):
            heads.append(cells)
            continue
        if heads:
            yield _row(" ".join(filter(None, parts)) for parts in zip(*heads, strict=True))
            yield "|" + "---|" * len(heads[0])
            heads = []
        if cells:
            yield _row(cells)
        elif not _EDGE.match(line):
            yield line


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(CLAIMS.read_text(encoding="utf-8")), encoding="utf-8")
