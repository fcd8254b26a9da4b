"""Which line of a user's code an error came from, or runs just now."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_NOT_MODELS = frozenset({"torch", "penstock", "sympy", "mpmath", "numpy", "functorch"})
"""Libraries whose lines say nothing about the model; nor do those of Python itself."""
_LONGEST = 120


@dataclass(frozen=True)
class CodeLine:
    """A line of code that belongs to a model.

    Attributes:
        file: where it is.
        number: of the line, from 1.
        function: whose line it is.
        text: all that the function does there, or ``""`` if the source is not at hand.
        part: of the text, what failed; all of it if that is not known.
    """

    file: str
    number: int
    function: str
    text: str
    part: str

    def __str__(self) -> str:
        text = self.text if len(self.text) <= _LONGEST else self.part[:_LONGEST]
        shown = f", `{text}`" if text else ""
        return f"{Path(self.file).name}:{self.number}, in {self.function}{shown}"


def lines_of(error: BaseException) -> list[CodeLine]:
    """The lines of a model's code through which an error came, the innermost last: one of a library
    of models if it came from there, and before it that of the user's own files that called it."""
    for cause in causes_of(error):
        lines = [
            (_is_installed(summary.filename), _code_line(summary))
            for (frame, _), summary in zip(
                traceback.walk_tb(cause.__traceback__),
                traceback.extract_tb(cause.__traceback__),
                strict=True,
            )
            if is_models(frame)
        ]
        if lines:
            own = [line for installed, line in lines if not installed]
            inner = [line for installed, line in lines[-1:] if installed]
            return own[-1:] + inner
    return []


def because(lines: Sequence[CodeLine]) -> str:
    """Words that name lines of a model's code, to follow a statement; none if there are none."""
    if not lines:
        return ""
    called = f" (called in {lines[0]})" if len(lines) > 1 else ""
    return f", because of {lines[-1]}{called}"


def running_line(frame: FrameType | None, calm: Iterable[object] = ()) -> CodeLine | None:
    """The line of a model's code that runs just now.

    Args:
        frame: where to begin; its callers are asked, too.
        calm: modules whose code does not count, nor what they call.

    Returns:
        ``None`` if no code of a model runs, or if one of those modules does.
    """
    innermost: CodeLine | None = None
    ignored = {id(module) for module in calm}
    while frame is not None:
        if id(frame.f_locals.get("self")) in ignored:
            return None
        if innermost is None and is_models(frame):
            number = frame.f_lineno
            text = linecache.getline(frame.f_code.co_filename, number).strip()
            name = frame.f_code.co_name
            innermost = CodeLine(frame.f_code.co_filename, number, name, text, text)
        frame = frame.f_back
    return innermost


def called_functions(error: BaseException) -> set[str]:
    """The names of all functions, of whomever, through which an error came."""
    return {
        frame.f_code.co_name
        for cause in causes_of(error)
        for frame, _ in traceback.walk_tb(cause.__traceback__)
    }


def is_models(frame: FrameType) -> bool:
    """Whether a frame runs code of a model, and not of a library below it."""
    module = frame.f_globals.get("__name__")
    if not isinstance(module, str):
        return False  # code that a tracer has generated
    root = module.partition(".")[0]
    known = root in _NOT_MODELS or root in sys.stdlib_module_names
    return module.startswith("penstock.demo") or not known


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came from."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _is_installed(file: str) -> bool:
    return bool({"site-packages", "dist-packages"} & {*Path(file).parts})


def _code_line(summary: traceback.FrameSummary) -> CodeLine:
    number = summary.lineno or 0
    lines = [
        linecache.getline(summary.filename, place)
        for place in range(number, (summary.end_lineno or number) + 1)
    ]
    text = " ".join(line.strip() for line in lines)
    return CodeLine(summary.filename, number, summary.name, text, _part(summary, lines) or text)


def _part(summary: traceback.FrameSummary, lines: list[str]) -> str:
    """The part of a line that failed, if it is one line."""
    if len(lines) != 1 or summary.colno is None or summary.end_colno is None:
        return ""
    return lines[0].encode()[summary.colno : summary.end_colno].decode(errors="ignore")
