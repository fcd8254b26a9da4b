"""``LayerSums``: what the layers of any stage have together, alone and for all stages at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from penstock.base.kept import kept
from penstock.core.graph import Layer, LayerGraph
from penstock.planning.partition.chain import Ints, Table, starts_of
from penstock.planning.planner.ties import OF_PARAMETERS, Tie, ties_of


class LayerSums:
    """The numbers of layers ``[start, stop)`` of a model.

    Args:
        graph: the model.
        places: where the exact search may cut it, the two ends included.
    """

    def __init__(self, graph: LayerGraph, places: tuple[int, ...]) -> None:
        self.graph = graph
        self.places = places
        self._known_tables: dict[str, Table] = {}

    @cached_property
    def sums(self) -> dict[str, list[float]]:
        """Running sums of each number of a layer, by its name: entry k is that of the first k
        layers."""
        names = (
            "forward_seconds", "backward_input_seconds", "backward_weight_seconds",
            "split_forward_seconds", "split_seconds", "update_seconds", "collective_seconds",
            "parameter_bytes",
            "optimizer_bytes", "buffer_bytes", "activation_bytes", "weight_kept_bytes",
        )  # fmt: skip
        layers = self.graph.layers
        columns: dict[str, Iterable[float]] = {
            name: [getattr(layer, name) for layer in layers] for name in names
        }
        columns["recompute_seconds"] = map(_again_seconds, layers)
        columns["gradient_bytes"] = [layer.summed_bytes for layer in layers]
        columns["again_input_bytes"] = [
            layer.loss_bytes + (held if begins else 0.0)
            for layer, held, begins in zip(layers, self.input_bytes, self.begins_unit, strict=False)
        ]
        return {name: list(accumulate(column, initial=0)) for name, column in columns.items()}

    def sum(self, name: str, start: int, stop: int) -> float:
        """The sum of one number of a layer over layers ``[start, stop)``; what parameters have that
        several of these layers hold counts once."""
        column = self.sums[name]
        whole = column[stop] - column[start]
        if not self.ties or name not in OF_PARAMETERS:
            return whole
        place = OF_PARAMETERS.index(name)
        return whole - sum(
            max(tie.num_holders(start, stop) - 1, 0) * tie.counted[place] for tie in self.ties
        )

    def trained_bytes(self, start: int, stop: int) -> float:
        """Bytes of parameters, gradients and optimizer state of layers ``[start, stop)``."""
        names = "parameter_bytes", "gradient_bytes", "optimizer_bytes"
        return sum(self.sum(name, start, stop) for name in names)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all parameters, gradients, optimizer state and buffers."""
        whole = 0, len(self.graph.layers)
        return int(self.trained_bytes(*whole) + self.sum("buffer_bytes", *whole))

    def ways_in(self, name: str, count: int) -> float:
        """The seconds of no layer, of the first, of the first two, and so on, together: of so many
        ways, each of which has a layer more.

        Args:
            name: of the seconds.
        """
        return sum(self.sums[name][:count])

    @cached_property
    def crossing_bytes(self) -> tuple[int, ...]:
        """Bytes that cross the cut in front of each layer; 0 in front of the first."""
        return (0, *self.graph.crossing_bytes)

    @cached_property
    def input_bytes(self) -> tuple[int, ...]:
        """Bytes of the input of a stage that begins with each layer; 0 behind the last one."""
        return (self.graph.input_bytes, *self.crossing_bytes[1:], 0)

    @cached_property
    def begins_unit(self) -> tuple[bool, ...]:
        """For each layer, whether it runs again apart from the layer before it, where layers
        recompute."""
        units = [layer.unit for layer in self.graph.layers]
        return (True, *(not unit or unit != before for before, unit in pairwise(units)))

    def again_input_bytes(self, start: int, stop: int) -> int:
        """Bytes that a microbatch keeps at a stage with layers ``[start, stop)`` that run again."""
        first = 0 if self.begins_unit[start] else self.input_bytes[start]
        return int(self.sum("again_input_bytes", start, stop)) + first

    @cached_property
    def compute_seconds(self) -> tuple[float, ...]:
        """Forward and backward of a microbatch, of each layer."""
        return tuple(layer.compute_seconds for layer in self.graph.layers)

    @cached_property
    def least_forward_share(self) -> float:
        """The share of a layer's forward in its compute, where it is least."""
        pairs = zip(self.graph.layers, self.compute_seconds, strict=True)
        return min((layer.forward_seconds / whole for layer, whole in pairs if whole), default=1.0)

    def activation_bytes(self, start: int, stop: int) -> int:
        """Bytes that a microbatch keeps at a stage with layers ``[start, stop)``."""
        # A stage hands back the gradient of its input, so it holds that whatever its layers keep.
        held = self.graph.layers[start].held_input_bytes
        return int(self.sum("activation_bytes", start, stop)) + held

    @kept
    def numbers(self, start: int, stop: int) -> dict[str, float]:
        """The sums that ``tables`` has, by their names, for one stage with layers ``[start,
        stop)``, wherever these begin and end."""
        return {
            **{name: self.sum(name, start, stop) for name in self.sums},
            "activation_bytes": self.activation_bytes(start, stop),
            "again_input_bytes": self.again_input_bytes(start, stop),
            "workspace_bytes": self.workspace_bytes(start, stop, again=False),
            "again_workspace_bytes": self.workspace_bytes(start, stop, again=True),
            "largest_bytes": max(layer.parameter_bytes for layer in self.graph.layers[start:stop]),
            "largest_gradient_bytes": max(
                layer.summed_bytes for layer in self.graph.layers[start:stop]
            ),
            "tied_bytes": sum(tie.num_bytes for tie in self.ties if tie.is_parted(start, stop)),
        }

    def tables(self, num_rows: int) -> dict[str, Table]:
        """The results of ``numbers``, and a stage's ``input_bytes``, for all stages between two of
        ``places`` that have up to so many of what is between two; kept for whoever asks for fewer.
        Where there is no such stage, there is any number."""
        known = self._known_tables
        if not known or len(known["input_bytes"]) < num_rows:
            known.update(self._tables(num_rows))
        return {name: table[:num_rows] for name, table in known.items()}

    def _tables(self, num_rows: int) -> dict[str, Table]:
        places = np.array(self.places)
        starts = starts_of(num_rows, len(places))
        tables = {}
        for name, column in self.sums.items():
            sums = np.array(column, dtype=float)[places]
            tables[name] = sums - sums[starts]
        inputs = np.array(self.input_bytes, dtype=float)
        tables["input_bytes"] = inputs[places][starts]
        held = np.array([*(layer.held_input_bytes for layer in self.graph.layers), 0.0])
        tables["activation_bytes"] += held[places][starts]
        inside = np.where((*self.begins_unit, True), 0.0, inputs)
        tables["again_input_bytes"] += inside[places][starts]
        for again in (False, True):
            name = "again_workspace_bytes" if again else "workspace_bytes"
            tables[name] = np.zeros(starts.shape)
            for number, start in enumerate(self.places[:-1]):
                ends = self.places[number + 1 : number + 1 + num_rows]
                needed = np.array(self._workspaces(start, ends[-1], again))
                rows = np.arange(len(ends))
                tables[name][rows, number + 1 + rows] = needed[np.array(ends) - start - 1]
        self._count_ties_once(tables, starts)
        layers = self.graph.layers
        tables["largest_bytes"] = self._largest([own.parameter_bytes for own in layers], num_rows)
        tables["largest_gradient_bytes"] = self._largest(
            [own.summed_bytes for own in layers], num_rows
        )
        return tables

    def _largest(self, layer_bytes: Sequence[int], num_rows: int) -> Table:
        """The most that a layer has of some bytes."""
        between = np.maximum.reduceat(np.array(layer_bytes, dtype=float), self.places[:-1])
        rows = [np.array([0.0, *between])]
        for _ in range(1, num_rows):
            rows.append(np.maximum(rows[0], [0.0, *rows[-1][:-1]]))
        return np.array(rows)

    def _count_ties_once(self, tables: dict[str, Table], starts: Ints) -> None:
        tables["tied_bytes"] = np.zeros(starts.shape)
        for tie in self.ties:
            holders = tie.num_holders_between(self.places)[starts, np.arange(starts.shape[1])]
            is_parted = (holders > 0) & (holders < len(tie.holders))
            tables["tied_bytes"] += tie.num_bytes * is_parted
            for name, counted in zip(OF_PARAMETERS, tie.counted, strict=True):
                tables[name] -= counted * np.maximum(holders - 1, 0)

    def _workspaces(self, start: int, stop: int, again: bool) -> list[float]:
        """Room to work, in bytes, of the stages that begin with layer ``start``, for each layer
        before ``stop`` that may be their last."""
        needed, most, room, held = [], 0.0, 0.0, 0.0
        for index in range(start, stop):
            layer = self.graph.layers[index]
            if index == start or self.begins_unit[index]:
                room, held = 0.0, 0.0
            room = max(room, layer.workspace_bytes)
            held += layer.activation_bytes - layer.loss_bytes if again else 0
            most = max(most, room + held)
            needed.append(most)
        return needed

    def workspace_bytes(self, start: int, stop: int, *, again: bool) -> int:
        """Room to work, in bytes, of the layer in ``[start, stop)`` that needs most.

        Args:
            again: whether the layers run forward again, unit by unit, so that the activations of
                one unit are there besides.
        """
        return int(self._workspaces(start, stop, again)[-1])

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters that several layers hold."""
        return ties_of(self.graph)


def _again_seconds(layer: Layer) -> float:
    return layer.forward_seconds if layer.recompute_seconds is None else layer.recompute_seconds
