"""The memory that a layer needs only while it runs, on devices that can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.device.accelerators import is_on_host
from penstock.model import tree
from penstock.profiler.alone.chain import RunLayer
from penstock.stage.microbatch_graph import MicrobatchGraph, cut, edges


class Gauge(Protocol):
    """Tells how much memory of a device is taken, and how much it has been at most."""

    def taken(self) -> int:
        """The bytes that are taken now."""
        ...

    def peak(self) -> int:
        """The most bytes since ``forget_peak``."""
        ...

    def forget_peak(self) -> None:
        """Begin anew with what is taken now."""
        ...


class AcceleratorGauge:
    """Asks torch's allocator of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def taken(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated(self._device)

    def forget_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)


def gauge_of(device: torch.device) -> Gauge | None:
    """The gauge of a device; ``None`` where nobody counts, as on a CPU."""
    return None if is_on_host(device) else AcceleratorGauge(device)


def measure_workspaces(runs: Sequence[RunLayer], inputs: Any, gauge: Gauge) -> list[int]:
    """Measure the bytes that every layer's forward or backward takes beyond what was taken before
    and what is left after it, whichever is more."""
    value, graphs, workspaces = tree.replace(Tensor, Tensor.clone, inputs), [], []
    for index, run in enumerate(runs):
        leaves, value = cut(value, index > 0)
        before = _begin(gauge)
        value = run(value)
        workspaces.append(_beyond(gauge, before))
        graphs.append(MicrobatchGraph(leaves, {}, edges(value), {}, False, None))
    gradients: Sequence[Tensor | None] = [
        torch.ones_like(leaf) if isinstance(leaf, Tensor) else None
        for leaf in tree.flatten(value)[0]
    ]
    del value
    for index in reversed(range(len(graphs))):
        graph = graphs.pop()
        before = _begin(gauge)
        gradients = graph.backward(gradients, {}).inputs
        workspaces[index] = max(workspaces[index], _beyond(gauge, before))
    return workspaces


def _begin(gauge: Gauge) -> int:
    gauge.forget_peak()
    return gauge.taken()


def _beyond(gauge: Gauge, before: int) -> int:
    return max(0, gauge.peak() - max(before, gauge.taken()))
