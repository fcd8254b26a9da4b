"""Keeping torch from printing whole graphs where an export fails: our error says what matters.

``sys.stderr`` belongs to all threads, so it stays as it is. The module of torch that prints the
graph is given a ``print`` of its own while anybody exports; it leaves out the graphs of those
threads that asked for it.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

_WARNS = "torch.fx.experimental.symbolic_shapes"
_COMPLAINS = "torch._subclasses.fake_tensor"
"""Logs whole tracebacks of errors, which our own error has as its cause."""

_LOCK = threading.Lock()
_HUSHED: Counter[int] = Counter()
"""How often each thread is inside ``without_dumps``; the last to leave restores what is shared."""


@contextlib.contextmanager
def without_dumps() -> Iterator[None]:
    """While active, the graph that ``torch.export`` prints with an error in this thread is not
    shown, nor what it logs about sizes and tensors without values. All else is written as ever,
    also by other threads."""
    # It takes a second, and only who captures a model needs it.
    import torch.export._trace as prints

    thread = threading.get_ident()

    def lets_through(record: logging.LogRecord) -> bool:
        most = logging.ERROR if record.name == _COMPLAINS else logging.WARNING
        return record.thread != thread or record.levelno > most

    loggers = [logging.getLogger(name) for name in (_WARNS, _COMPLAINS)]
    for logger in loggers:
        logger.addFilter(lets_through)
    with _LOCK:
        _HUSHED[thread] += 1
        vars(prints)["print"] = _print
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(lets_through)
        with _LOCK:
            _HUSHED.subtract([thread])
            if not _HUSHED[thread]:
                del _HUSHED[thread]
            if not _HUSHED:
                del vars(prints)["print"]


def _print(*values: Any, **options: Any) -> None:
    dump = getattr(sys.exc_info()[1], "partial_fx_graph", None)
    is_dump = dump is not None and any(value is dump for value in values)
    if not is_dump or threading.get_ident() not in _HUSHED:
        builtins.print(*values, **options)  # noqa: T201 - torch's own words
