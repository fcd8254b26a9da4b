"""Prose in lines that fit a window."""

from __future__ import annotations

from textwrap import fill

from penstock.base.errors import printable

WARNING = "! "
"""Stands before what is doubtful."""


def wrap_to(text: str, width: int, beside: str = "") -> str:
    """A sentence in lines of at most so many columns; a longer word, as a path, stays whole.

    Args:
        beside: what stands before the first line, under which the others are indented.

    >>> print(wrap_to("ranks wait for each other", 16, "! "))
    ! ranks wait for
      each other
    """
    return fill(
        printable(text),  # before a control character passes for a space
        width,
        initial_indent=beside,
        subsequent_indent=" " * len(beside),
        break_long_words=False,
        break_on_hyphens=False,
    )
