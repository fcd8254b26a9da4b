"""Libraries that an extra brings: one sentence where one of them is not there."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from penstock.base.errors import InputError


def need(libraries: Sequence[str], extra: str, what: str) -> None:
    """See that libraries can be imported, and that nothing else is said if they cannot.

    Args:
        libraries: as they are imported.
        extra: of Penstock, which brings them.
        what: needs them, for the error.

    Raises:
        InputError: one is not installed.
    """
    for library in libraries:
        try:
            importlib.import_module(library)
        except ModuleNotFoundError as error:
            if error.name != library:  # it is there, and lacks something itself
                raise
            raise InputError(
                f"{what} needs {library}, which is not installed; pip install 'penstock[{extra}]'"
            ) from None
