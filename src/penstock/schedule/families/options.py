"""What families check about their options, so that every refusal reads the same."""

from __future__ import annotations

from penstock.errors import InputError


def at_least(family: str, option: str, value: int, least: int) -> None:
    """Raise ``InputError`` unless an option is a whole number that is large enough.

    >>> at_least("interleaved-1f1b", "stages_per_rank", 0, 1)
    Traceback (most recent call last):
    penstock.errors.InputError: interleaved-1f1b: stages_per_rank is 0, but must be ≥ 1
    """
    # True is an int to Python, and never what somebody means by a count.
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(
            f"{family}: {option} is {value!r}, but must be a whole number ≥ {least}; "
            f"write {option}={least} or more"
        )
    if value < least:
        raise InputError(f"{family}: {option} is {value}, but must be ≥ {least}")
