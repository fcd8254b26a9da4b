"""Functions captured in CUDA graphs, by the rules that torch documents for ``torch.cuda.graph``.

Nobody has run this on hardware yet: ``make gpu`` has the tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import RunError

_CAPTURING = threading.Lock()
"""A device captures one graph at a time."""

_NUM_WARM_UPS = 3
"""As torch's page says: libraries allocate and choose kernels in their first calls."""


KINDS = ("cuda",)
"""The kinds of device on which work can be captured."""

UNTRIED = (
    "replay=True captures CUDA graphs, which nobody has run on hardware yet: compare with eager"
)
"""Said where it is wanted, as long as it is true."""


class CapturedFunction:
    """A function of tensors on one CUDA device that overwrites none of them; captured in the first
    call, and replayed from then on.

    Args:
        run: empties the list of what it is given.
        num_weights: how many of its last arguments stay where they are in memory.
    """

    def __init__(self, run: Callable[[list[Any]], Sequence[Any]], num_weights: int) -> None:
        self._run = run
        self._num_weights = num_weights
        self._graph: torch.cuda.CUDAGraph | None = None
        self._taken: list[Tensor] = []
        self._made: Sequence[Any] = ()

    def __call__(self, values: list[Tensor]) -> Sequence[Any]:
        """What the function gives, in memory of its own."""
        if self._graph is None:
            self._graph = self._captured(values)
        start = len(values) - self._num_weights
        for own, value in zip(self._taken[:start], values, strict=False):
            own.copy_(value)
        for own, value in zip(self._taken[start:], values[start:], strict=True):
            if own.data_ptr() != value.data_ptr():
                raise RunError(
                    "weights have moved in memory since their passes were captured in CUDA graphs; "
                    "leave replay out"
                )
        values.clear()
        self._graph.replay()
        # The next replay overwrites what this one has made.
        return [made.clone() if isinstance(made, Tensor) else made for made in self._made]

    def _captured(self, values: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        start = len(values) - self._num_weights
        self._taken = [*(value.clone() for value in values[:start]), *values[start:]]
        graph, device = torch.cuda.CUDAGraph(), values[0].device
        with _CAPTURING, torch.cuda.device(device):
            beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            beside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(beside):
                for _ in range(_NUM_WARM_UPS):
                    self._run(list(self._taken))
            torch.cuda.current_stream(device).wait_stream(beside)
            # Other ranks may be threads that allocate on this device meanwhile.
            with torch.cuda.graph(graph, stream=beside, capture_error_mode="thread_local"):
                self._made = self._run(list(self._taken))
        return graph
