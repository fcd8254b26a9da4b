"""Why code that a model brings with it cannot run on shapes alone, with its name and a remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.base.errors import ModelError, PenstockError

_OPERATION = re.compile(r"CustomOpDef\((\w+::\w+)\)|[`' ](\w+::\w+)(?:\.\w+)?['`]?[:( ]")
_NO_KERNEL = re.compile("no fake impl|'Meta' backend|[Mm]eta kernel|meta implementation")
_NO_VALUES = re.compile("[Mm]eta tensor|meta device|data-dependent|data-independent|is_nonzero")
_HIDDEN = frozenset({"penstock", "torch"})


@contextmanager
def code_that_needs_more_than_shapes() -> Iterator[None]:
    """Errors of what torch cannot run on meta say which operation or function it is, and what to
    do.

    Raises:
        ModelError: an operation has no kernel for shapes, or a function looks at values.
    """
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, PenstockError) else error
        if cause is None or isinstance(cause, PenstockError):
            raise
        refusal = _refusal(cause)
        if refusal is None:
            raise
        where = str(error).partition(" failed on ")[0] + ": " if error is not cause else ""
        raise ModelError(f"{where}{refusal}") from cause


def _refusal(cause: BaseException) -> str | None:
    words = str(cause)
    operation = _OPERATION.search(words)
    if _NO_KERNEL.search(words) and operation is not None:
        name = operation[1] or operation[2]
        return (
            f"the operation {name} has no kernel for shapes alone, so nobody can estimate it: say "
            f"which shapes it makes, with torch.library.register_fake({name!r}), and its flops, "
            "with torch.utils.flop_counter.register_flop_formula; or profile the model"
        )
    if _NO_VALUES.search(words):
        return (
            f"{_place(cause)} looks at the values of tensors, which an estimate does not have "
            f"({_first_sentence(words)}): keep them in tensors (no item(), numpy() or "
            "if), or profile the model"
        )
    return None


def _first_sentence(words: str) -> str:
    return words.splitlines()[0].partition(". ")[0].partition(",")[0].rstrip(".")


def _place(cause: BaseException) -> str:
    """The innermost function that is neither torch's nor ours, as ``Scaled.backward (model.py,
    line 7)``."""
    for frame, line in reversed(list(traceback.walk_tb(cause.__traceback__))):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _HIDDEN:
            code = frame.f_code
            name = code.co_qualname.rpartition("<locals>.")[2]
            return f"{name} ({Path(code.co_filename).name}, line {line})"
    return "the model"
