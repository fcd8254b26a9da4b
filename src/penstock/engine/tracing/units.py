"""Captured layers that are recomputed together, and what goes around them meanwhile.

A captured layer may be a single batch norm. Its input is all that it would keep anyway, and
recomputing it costs time for nothing. So the layers of a block are recomputed as one: between them
nothing is kept. A block is an entry of a list of modules, as with ``granularity="block"``; outside
of lists, and for what has no weight matrix of its own (norms, activations, pools), layers go with
those before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from torch import nn

from penstock.engine.model.replay import Run
from penstock.engine.tracing.layers import CapturedLayer
from penstock.engine.tracing.segments import called


def number_units(layers: Sequence[CapturedLayer], blocks: Sequence[str]) -> None:
    """Set ``unit`` of each layer: equal for layers that are recomputed together.

    Args:
        layers: all layers of a captured model, in execution order.
        blocks: the name of each layer's block.
    """
    unit = -1
    for own in _runs(layers, blocks):
        unit += 1 if unit < 0 or any(map(_weighs, own)) else 0
        for layer in own:
            layer.unit = unit


def _runs(layers: Sequence[CapturedLayer], blocks: Sequence[str]) -> Iterator[list[CapturedLayer]]:
    """Split layers into runs of one block; where the block is called again, another run begins."""
    for _, group in itertools.groupby(zip(layers, blocks, strict=True), itemgetter(1)):
        own: list[CapturedLayer] = []
        met: set[str] = set()
        for layer, _ in group:
            name = called(layer.spine_name)
            if name in met and _weighs(layer):
                yield own
                own, met = [], set()
            own.append(layer)
            met.add(name)
        yield own


def _weighs(layer: CapturedLayer) -> bool:
    return any(parameter.dim() > 1 for parameter in layer.parameters())


class RecomputedTogether:
    """Consecutive layers that are recomputed as one."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        self._paths: dict[tuple[bool, ...], dict[int, int]] = {}

    def beside(self, run: Run) -> Run:
        """Make a run that is not given what the layers only hand on, so that nobody keeps it.

        Args:
            run: runs the layers.
        """

        def run_the_rest(value: Any, recalled: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
            path = self._path()
            if not path:
                return run(value, recalled)
            passing = set(path.values())
            rest = tuple(None if k in passing else leaf for k, leaf in enumerate(value))
            output, drew, stashed = run(rest, recalled)
            whole = (value[path[k]] if k in path else leaf for k, leaf in enumerate(output))
            return tuple(whole), drew, stashed

        return run_the_rest

    def _path(self) -> dict[int, int]:
        modes = tuple(module.training for module in self.modules)
        if modes not in self._paths:
            self._paths[modes] = _handed_on(self.modules)
        return self._paths[modes]


def units_of(modules: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """(start, stop) of layers that are recomputed together; one that is not captured is alone."""
    keys = [
        ("captured", module.unit) if isinstance(module, CapturedLayer) else ("alone", index)
        for index, module in enumerate(modules)
    ]
    groups = [list(group) for _, group in itertools.groupby(range(len(keys)), keys.__getitem__)]
    return [(group[0], group[-1] + 1) for group in groups]


def _handed_on(modules: Sequence[nn.Module]) -> dict[int, int]:
    """For each value that layers hand on untouched in their modes: its position in their output,
    and as the dictionary's value that in their input."""
    programs = [module.program for module in modules if isinstance(module, CapturedLayer)]
    if len(programs) < len(modules) or any(program.uses is None for program in programs):
        return {}
    origins: list[int | None] = list(range(programs[0].num_inputs))
    used: set[int | None] = set()
    for program in programs:
        used.update(origins[position] for position in program.uses or ())
        origins = [None if position is None else origins[position] for position in program.hands_on]
    return {
        position: origin
        for position, origin in enumerate(origins)
        if origin is not None and origin not in used
    }
