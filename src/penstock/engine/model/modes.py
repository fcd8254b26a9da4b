"""Modes of torch in whose threads every function, or every operation, goes through a method.

torch's own hook has a longer signature, of which nothing else here is used.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Args = tuple[Any, ...]
Named = dict[str, Any]


class FunctionMode(TorchFunctionMode):
    """While active in a thread, calls of torch's functions go through ``call``."""

    @abstractmethod
    def call(self, func: Any, args: Args, named: Named) -> Any:
        """Do what ``func`` is called for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: Named | None = None
    ) -> Any:
        return self.call(func, args, kwargs or {})


class DispatchMode(TorchDispatchMode):
    """While active in a thread, operations go through ``call``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    @abstractmethod
    def call(self, func: Any, args: Args, named: Named) -> Any:
        """Perform an operation."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Named | None = None
    ) -> Any:
        return self.call(func, args, kwargs or {})
