"""A row of the page about the lectures' results, and how it is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

COLUMNS = ("result", "published", "predicted", "ratio", "measured here", "note")


class Answer(NamedTuple):
    """A row of the page.

    Attributes:
        result: what is compared, in words.
        published, predicted: as they are shown.
        ratio: of the predicted figure to the published one, where both are numbers.
        holds: whether a direction, which has no number, is the published one.
        measured: what this machine shows of the same effect, if it can show it.
        note: what else is to be said.
    """

    result: str
    published: str
    predicted: str
    ratio: float | None = None
    holds: bool | None = None
    note: str = ""
    measured: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """As they stand below ``COLUMNS``."""
        verdict = ""
        if self.ratio is not None:
            verdict = f"{self.ratio:.2f}"
        elif self.holds is not None:
            verdict = "as published" if self.holds else "**missed**"
        return self.result, self.published, self.predicted, verdict, self.measured, self.note


def shown(answers: Iterable[Answer]) -> list[tuple[str, ...]]:
    """The rows of a table, as text."""
    return [answer.cells for answer in answers]


def times(ratios: Iterable[float], digits: int = 1) -> str:
    """Numbers as multiples of something."""
    return " ".join(f"{ratio:.{digits}f}×" for ratio in ratios)


def never_falls(values: Sequence[float], slack: float = 0.01) -> bool:
    """Whether each value is at least the one before, but for a share of it."""
    return all(after >= before * (1 - slack) for before, after in pairwise(values))
