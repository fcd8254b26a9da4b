"""``TensorGroups``: devices that stand for one, since they share layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.base.units import count_of
from penstock.core.cluster import Device, Topology
from penstock.core.graph import Layer, LayerGraph
from penstock.planning.plans.stage_plan import Split

if TYPE_CHECKING:
    from penstock.planning.partition.tensor import TensorSplit


@dataclass(frozen=True)
class TensorGroups:
    """Who shares layers with whom, and how.

    Attributes:
        devices: those of each group, which stands for one device of a task's cluster.
        tensor_split: which layers are split, and how; where groups are of different sizes, the
            layers of the large ones.
        graph: the model before it was split.
        topology: of the cluster whose devices are in groups.
    """

    devices: tuple[tuple[Device, ...], ...]
    tensor_split: TensorSplit
    graph: LayerGraph
    topology: Topology

    @property
    def num_ranks(self) -> int:
        """Devices of the largest group."""
        return max(map(len, self.devices))

    @property
    def are_alike(self) -> bool:
        """Whether all groups are equally large."""
        return len({*map(len, self.devices)}) == 1

    @cached_property
    def num_on_card(self) -> tuple[int, ...]:
        """How many devices of each group share a network card, of that which most share."""
        cards = self._numbers_of(self.topology.cards)
        # Where nobody says, they share one.
        return tuple(max(Counter(own).values()) for own in cards)

    @cached_property
    def straddle(self) -> tuple[bool, ...]:
        """Whether the devices of each group are on several hosts."""
        return tuple(len({*own}) > 1 for own in self._numbers_of(self.topology.hosts))

    def _numbers_of(self, by_device: Sequence[int]) -> Iterator[list[int]]:
        names = (device.name for device in self.topology.cluster.devices)
        number_of = dict(zip(names, by_device, strict=True))
        return ([number_of[device.name] for device in own] for own in self.devices)

    def longer_collectives(self, name: str, layers: Sequence[Layer], speed: float) -> float:
        """What communication in some layers takes longer than they say where the devices of a
        stage have another speed than those for which layers were split; as long as in the profile.

        Args:
            name: of the seconds of a layer.
            speed: of the slowest of the devices.
        """
        split = self.tensor_split
        if speed == split.speed:
            return 0.0
        own = (split.collectives.get(layer.name, {}).get(name, 0.0) for layer in layers)
        return (speed / split.speed - 1) * sum(own)

    def splits(self, layers: Sequence[str]) -> dict[str, Split]:
        """How the group shares some layers, by their names and those of modules in them; patterns
        stand for modules of layers whose names differ in numbers alone."""
        said = {name: self.tensor_split.said(name) for name in layers}
        alike: dict[str, set[str]] = {}
        for own in said.values():
            for name, how in own.items():
                alike.setdefault(_pattern(name), set()).add(how)
        having = Counter(_pattern(name) for own in said.values() for name in own)
        bodies = Counter(map(_pattern, layers))
        splits: dict[str, Split] = {}
        for layer, own in said.items():
            for name, how in own.items():
                key = _pattern(name)
                everywhere = having[key] == bodies[_pattern(layer)]
                is_inside = name != layer and everywhere and len(alike[key]) == 1
                splits[key if is_inside else name] = how
        return splits

    @property
    def remarks(self) -> Iterator[str]:
        """Sentences on devices that have nothing to do, and on what the groups cannot share."""
        width, splits = self.num_ranks, self.tensor_split.splits
        by_positions = {name for name, split in splits.items() if split == "context"}
        kind = "context" if by_positions else "tensor"
        idle = len(self.topology.cluster.devices) - sum(map(len, self.devices))
        if idle and self.are_alike:
            yield (
                f"{width} {kind} ranks share each layer, so {idle} of the cluster's "
                f"{count_of(len(self.topology.cluster.devices), 'device')} "
                f"{'is' if idle == 1 else 'are'} idle: no group is left for "
                f"{'it' if idle == 1 else 'them'}"
            )
        refused: dict[tuple[str, str], list[str]] = {}
        for layer in self.graph.layers:
            for part in () if layer.name in by_positions else layer.parts:
                why = part.refusal(width)
                if why:
                    refused.setdefault((part.kind, why), []).append(layer.name)
        *_, last = self.graph.layers
        said = self.tensor_split.said(last.name) if self.tensor_split.splits else {}
        if any(head.loss == "whole" and head.splits.keys() <= said.keys() for head in last.parts):
            yield (
                f"the loss does more with the logits of {last.name} than a cross entropy can do on "
                "shards of them, so each tensor rank gathers all of them; F.cross_entropy of "
                "reshaped, cast or scaled logits needs no gather"
            )
        for (kind, why), names in refused.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield (
                f"{width} tensor ranks cannot share the {kind} of {names[0]}{more}, since {why}: "
                "each of them computes all of it"
            )


def _pattern(name: str) -> str:
    return ".".join("*" if atom.isdecimal() else atom for atom in name.split("."))
