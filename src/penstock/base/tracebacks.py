"""Tracebacks as users see them: their own lines, without those between their call and the layer or
the check that raised.

``PENSTOCK_TRACEBACK=full`` leaves them as they are.
"""

from __future__ import annotations

import os
from types import TracebackType

from penstock.base.errors import PenstockError

VARIABLE = "PENSTOCK_TRACEBACK"
_HIDDEN = frozenset({"penstock", "torch"})


def shorten(error: BaseException) -> None:
    """Take the frames of Penstock and of torch out of an error's traceback, and of those that it
    comes from.

    An error that Penstock raised without wanting to keeps them: they say where.
    """
    if os.environ.get(VARIABLE) == "full":
        return
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, PenstockError) or not _is_own_fault(current):
            current.__traceback__ = _of_others(current.__traceback__)
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)


def _is_own_fault(error: BaseException) -> bool:
    """Whether a line of Penstock has raised an error that is none of Penstock's."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and _library_of(traceback) == "penstock"


def _of_others(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback of the frames that are nobody's of those that are hidden."""
    frames = []
    while traceback is not None:
        if _library_of(traceback) not in _HIDDEN:
            frames.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for frame in reversed(frames):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def _library_of(traceback: TracebackType) -> str:
    """The package that a frame's code belongs to. Of code that tracers make, torch's."""
    module = traceback.tb_frame.f_globals.get("__name__")
    if not isinstance(module, str):
        return "torch"
    if module.startswith("penstock.demo"):  # a model, as users have them
        return module
    return module.partition(".")[0]
