"""numpy, loaded when it is first used: whoever plans nothing should not wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
else:

    class _WhenUsed:
        def __getattr__(self, name: str) -> Any:
            import numpy

            return getattr(numpy, name)

    np = _WhenUsed()
    Array = Floats = Ints = Any

__all__ = ["Array", "Floats", "Ints", "np"]
