"""Keeping torch from printing whole graphs where an export fails: our error says what matters."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator

_WARNS = "torch.fx.experimental.symbolic_shapes"


@contextlib.contextmanager
def without_dumps() -> Iterator[None]:
    """While active, the graph that ``torch.export`` prints with an error is not shown, nor its
    warnings about sizes. What else is written to ``sys.stderr`` comes when this ends."""
    held, thread = io.StringIO(), threading.get_ident()
    dump: object = None

    def lets_through(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno > logging.WARNING

    logger = logging.getLogger(_WARNS)
    logger.addFilter(lets_through)
    try:
        with contextlib.redirect_stderr(held):
            yield
    except Exception as error:
        dump = getattr(error, "partial_fx_graph", None)
        raise
    finally:
        logger.removeFilter(lets_through)
        written = held.getvalue()
        if dump is not None:
            written = written.replace(f"{dump}\n", "")
        if written and sys.stderr is not None:
            sys.stderr.write(written)
