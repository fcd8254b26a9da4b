"""The memory that a layer needs only while it runs, on devices that can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engine.device.memory import Gauge
from penstock.engine.model import tree
from penstock.engine.stage.microbatch_graph import MicrobatchGraph, cut, edges
from penstock.training.profiler.alone.chain import RunLayer


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
