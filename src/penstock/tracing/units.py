"""Captured layers that run again together, and what goes around them when they do.

A captured layer may be a single batch norm. Its input is all that it would keep anyway, and running
it again costs time for nothing. So the layers of a block run again as one: between them nothing is
kept. A block is an entry of a list of modules, as with ``granularity="block"``; outside of lists,
and for what has no weight matrix of its own (norms, activations, pools), layers go with those
before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from torch import nn

from penstock.model.replay import Run
from penstock.tracing.layers import CapturedLayer
from penstock.tracing.segments import called


def number_units(layers: Sequence[CapturedLayer], blocks: Sequence[str]) -> None:
    """Tell layers which of them run again together.

    Args:
        layers: of a captured model, in execution order.
        blocks: the name of each one's block.
    """
    unit = -1
    for own in _runs(layers, blocks):
        unit += 1 if unit < 0 or any(map(_weighs, own)) else 0
        for layer in own:
            layer.unit = unit


def _runs(layers: Sequence[CapturedLayer], blocks: Sequence[str]) -> Iterator[list[CapturedLayer]]:
    """Layers of one block in a row; where the block runs again, another run begins."""
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


class Unit:
    """Consecutive layers that run again together.

    Args:
        modules: the layers.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        self._paths: dict[tuple[bool, ...], dict[int, int]] = {}

    def beside(self, run: Run) -> Run:
        """``run`` without what the layers hand on and do not look at, which then nobody keeps.

        Args:
            run: runs the layers.
        """

        def run_the_rest(value: Any, recalled: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
            path = self._path()
            if not path:
                return run(value, recalled)
            passing = set(path.values())
            rest = tuple(None if at in passing else one for at, one in enumerate(value))
            output, drew, stashed = run(rest, recalled)
            whole = (value[path[at]] if at in path else one for at, one in enumerate(output))
            return tuple(whole), drew, stashed

        return run_the_rest

    def _path(self) -> dict[int, int]:
        modes = tuple(module.training for module in self.modules)
        if modes not in self._paths:
            self._paths[modes] = _handed_on(self.modules)
        return self._paths[modes]


def units_of(modules: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """(start, stop) of what runs again together; a layer that is not captured runs alone."""
    keys = [
        ("captured", module.unit) if isinstance(module, CapturedLayer) else ("alone", index)
        for index, module in enumerate(modules)
    ]
    groups = [list(group) for _, group in itertools.groupby(range(len(keys)), keys.__getitem__)]
    return [(group[0], group[-1] + 1) for group in groups]


def _handed_on(modules: Sequence[nn.Module]) -> dict[int, int]:
    """Position in what layers give, to that in what they are given, of what they hand on untouched
    in the modes that they are in."""
    programs = [module.program for module in modules if isinstance(module, CapturedLayer)]
    if len(programs) < len(modules) or any(one.uses is None for one in programs):
        return {}
    origins: list[int | None] = list(range(programs[0].num_inputs))
    used: set[int | None] = set()
    for program in programs:
        used.update(origins[at] for at in program.uses or ())
        origins = [None if at is None else origins[at] for at in program.hands_on]
    return {
        at: origin for at, origin in enumerate(origins) if origin is not None and origin not in used
    }
