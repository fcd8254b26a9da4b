"""The layers of a stage in few words: the first, the last, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence


def first_to_last(names: Sequence[str]) -> str:
    """The first and the last layer, and how many there are, for sentences and headings.

    >>> first_to_last(["a"]), first_to_last(["a", "b", "c"])
    ('a', 'a … c (3 layers)')
    """
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}{how_many(names)}"


def counted(names: Sequence[str]) -> str:
    """How many layers there are, the first and the last, for the narrow column of a table, where
    the end may be cut off.

    >>> counted(["a"]), counted(["a", "b", "c"])
    ('1: a', '3: a … c')
    """
    return f"{len(names)}: {names[0]}{f' … {names[-1]}' if len(names) > 1 else ''}"


def how_many(names: Sequence[str]) -> str:
    """The words behind the last of several names."""
    return f" ({len(names)} layers)"
