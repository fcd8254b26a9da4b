"""Results that an object works out once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, TypeVarTuple

Owner = TypeVar("Owner")
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


def kept(method: Callable[[Owner, *Arguments], Result]) -> Callable[[Owner, *Arguments], Result]:
    """A method whose results its object keeps, by the arguments, for as long as it lives itself:
    as ``functools.cached_property`` for what has arguments."""
    name = f"results of {method.__name__}"

    @wraps(method)
    def asked(self: Owner, *arguments: *Arguments) -> Result:
        results: dict[tuple[*Arguments], Result] = vars(self).setdefault(name, {})
        if arguments not in results:
            results[arguments] = method(self, *arguments)
        return results[arguments]

    return asked
