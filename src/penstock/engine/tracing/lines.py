"""Lines of a user's code: where an error came from, what runs just now, and what to write instead.

What models do that no graph can hold are stories. The page that ``PAGE`` names tells each, with its
error as it is printed and a remedy that runs.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch import nn

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


def _called_functions(error: BaseException) -> set[str]:
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


PAGE = "docs/models-that-do-not-trace.md"

_ASKING = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
_DRAWING = r"\brand\w*\(|bernoulli|random|drop_?path|layer_?drop|skip_the_layer"
_WHOLE = "if it calls no other module, put it into one without children, which is called as it is"


@dataclass(frozen=True)
class TraceFailure:
    """A model that could not be traced.

    Attributes:
        model: the model.
        error: what ``torch.export`` said.
        lines: of the model's code through which it came, the innermost last.
    """

    model: nn.Module
    error: BaseException
    lines: Sequence[CodeLine]

    @property
    def looks_at_values(self) -> bool:
        """Whether the code needed values, of which there are none while a model is exported."""
        return type(self.error).__name__ in {
            "GuardOnDataDependentSymNode",
            "DataDependentOutputException",
            "PendingUnbackedSymbolNotFound",
        }

    @property
    def text(self) -> str:
        """The text of the innermost line, or nothing."""
        return self.lines[-1].text if self.lines else ""


def remedy_of(failure: TraceFailure) -> str | None:
    """Words on what the code does there and what to write instead; ``None`` if nobody knows."""
    for fits, remedy in _STORIES:
        if fits(failure):
            return remedy
    return None


def asks_its_mask(failure: TraceFailure) -> bool:
    """Whether an argument of a call would help, so that nothing needs to be left whole."""
    asks = "_detect_is_causal_mask" in _called_functions(failure.error)
    return asks and any(isinstance(module, _ASKING) for module in failure.model.modules())


def _packs(failure: TraceFailure) -> bool:
    packs = {"pack_padded_sequence", "pad_packed_sequence"} & _called_functions(failure.error)
    recurrent = any(isinstance(module, nn.RNNBase) for module in failure.model.modules())
    # A recurrent module that is given what was packed before asks it for a batch size.
    return bool(packs) or (recurrent and "failed to unpack the object" in str(failure.error))


def _branches(failure: TraceFailure) -> bool:
    return failure.looks_at_values and any(
        isinstance(node, ast.If | ast.While | ast.IfExp) for node in _syntax(failure.text)
    )


def _makes_numbers(failure: TraceFailure) -> bool:
    names = {"int", "float", "bool", "item", "tolist", "range", "max", "min", "round", "len"}
    return failure.looks_at_values and any(
        isinstance(node, ast.Call) and _name(node.func) in names for node in _syntax(failure.text)
    )


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _syntax(text: str) -> Iterator[ast.AST]:
    """The nodes of a line of code, which may be but the head of a statement."""
    if not text:
        return
    for tail in ("", "\n    pass", "\n    pass\nelse:\n    pass"):
        for head in ("", "if True:\n    pass\n"):  # for a line that begins with `elif`
            try:
                yield from ast.walk(ast.parse(f"{head}{text}{tail}"))
            except SyntaxError:
                continue
            return


_STORIES: tuple[tuple[Callable[[TraceFailure], bool], str], ...] = (
    (
        asks_its_mask,
        "a Transformer of torch looks into a mask to see whether it is causal, unless it is told. "
        "Give tgt_is_causal=True (an encoder: is_causal=True, nn.Transformer: src_is_causal=True "
        "as well) with a causal mask, else False",
    ),
    (
        _packs,
        "a packed sequence has another shape for other lengths, and no rows to cut into "
        "microbatches. Let the recurrent module read the padding, too, and take no notice of what "
        "it says there (a mask in the loss, or `output[rows, lengths - 1]` for the last word); or "
        "pack, read and pad in the forward of a class derived from the recurrent module",
    ),
    (
        lambda failure: ".numpy() is not supported" in str(failure.error),
        "what numpy computes is in no graph, and has no gradient. Write it with torch; or "
        f"{_WHOLE}",
    ),
    (
        lambda failure: "cannot register a hook on a tensor" in str(failure.error),
        "a hook on a tensor is in no graph, so the gradient would not go through it. Leave it out; "
        f"or {_WHOLE}",
    ),
    (
        lambda failure: failure.looks_at_values and bool(re.search(_DRAWING, failure.text)),
        "whether a layer runs is decided by a random number. Drop rows instead: multiply what the "
        "layer adds by `(torch.rand(rows, 1, …) > rate) / (1 - rate)`, so that every row has a "
        "depth of its own; or set the rate to 0",
    ),
    (
        _branches,
        "which way it goes depends on the values of a tensor, and a graph has but one way. Write "
        "`torch.where(condition, this, that)`, and call a module that is given no rows, too; or "
        f"{_WHOLE}",
    ),
    (
        lambda failure: failure.looks_at_values and failure.text.lstrip().startswith("assert"),
        "it looks at the values of a tensor. Leave it out, or check the batch before it goes into "
        "the pipeline",
    ),
    (
        _makes_numbers,
        "it makes a number of Python of a tensor, and what comes then depends on that number. Keep "
        "it a tensor (`value.clamp(min=1)`, `torch.maximum`, a mask instead of a length); or "
        f"{_WHOLE}",
    ),
    (
        lambda failure: failure.looks_at_values,
        "it looks at the values of a tensor, and a graph has none. Compute with tensors there; or "
        f"{_WHOLE}",
    ),
)
