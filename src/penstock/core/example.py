"""``Example``: the inputs that a model was traced with, as far as a file can say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from penstock.base.errors import InputError
from penstock.base.values import Value, shown

Granularity = Literal["module", "block"]
Dynamic = Literal["rows", "all"]

_DTYPE = re.compile(r"[a-z][a-z0-9_]*")


class Example(Value, frozen=True, kw_only=True):
    """How a model that names no spine was cut into layers, so that another process can cut it in
    the same way.

    Attributes:
        inputs: what the model was called with. A tensor is ``{"tensor": dtype, "shape": [...],
            "value": number}``, where ``value`` is its first element; a tuple ``{"tuple": [...]}``,
            a dictionary ``{"dict": {...}}``; lists, numbers, texts and ``null`` are themselves.
        granularity: one layer per ``"module"`` or per ``"block"``, as of ``penstock.capture``.
        dynamic: which sizes of the inputs may differ, likewise.

    Raises:
        InputError: ``inputs`` are not written in that way.
    """

    inputs: Any
    granularity: Granularity = "module"
    dynamic: Dynamic = "rows"

    def __post_init__(self) -> None:
        self.check_fields()
        for odd in _odd(self.inputs):
            raise InputError(
                f"example: {shown(odd)} is no input of a model; profile the model again, which "
                "writes it"
            )


def _odd(part: Any) -> Iterator[Any]:
    """The parts that do not describe an input."""
    match part:
        case None | bool() | int() | float() | str():
            return
        case list():
            parts = part
        case {"tensor": str(dtype), "shape": list(shape), "value": bool() | int() | float()} if (
            len(part) == 3
            and _DTYPE.fullmatch(dtype)
            and all(type(n) is int and n >= 0 for n in shape)
        ):
            return
        case {"tuple": list(parts)} if len(part) == 1:
            pass
        case {"dict": dict(entries)} if len(part) == 1 and all(type(key) is str for key in entries):
            parts = [*entries.values()]
        case _:
            yield part
            return
    for inner in parts:
        yield from _odd(inner)
