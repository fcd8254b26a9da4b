"""``Task``: a model, a cluster and a minibatch, and the numbers of any stage of any answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.base.units import count_of
from penstock.core.cluster import Cluster, Device, Link, Topology
from penstock.core.graph import Layer, LayerGraph, Mode
from penstock.core.schedule import Schedule
from penstock.core.timing.simulator.step import are_apart
from penstock.planning.handover.capabilities import CutsBetween
from penstock.planning.handover.modules import places_inside
from penstock.planning.partition.chain import (
    CostModel,
    Floats,
    Ints,
    Table,
    cost_model,
    least_slowest,
    starts_of,
)
from penstock.planning.partition.layers import places_near, spread_places
from penstock.planning.partition.steady.evaluation import MANY_PAIRS, links_in_turns
from penstock.planning.planner.hosts import Levels, RankPlaces, levels_worth_trying
from penstock.planning.planner.ties import OF_PARAMETERS, Tie, ties_of
from penstock.planning.plans.stage_plan import Split
from penstock.planning.plans.summing import GatheredFor, ReducerName

if TYPE_CHECKING:
    from penstock.planning.partition.tensor import TensorSplit

_MOST_PLACES = 256
_MOST_KEPT_OPS = 4_000_000
"""Of schedules that were built; with all that follows from it, one takes 50 bytes."""


class Pace(NamedTuple):
    """Factors on the profile's seconds: of forwards and backwards, and of updates."""

    passes: float
    updates: float


@dataclass(frozen=True)
class TensorGroups:
    """Who shares layers with whom, and how.

    Attributes:
        devices: those of each group, which stands for one device of the task's cluster.
        tensor_split: which layers are split, and how; where groups are of different sizes, the
            layers of the large ones.
        single: the task without groups.
    """

    devices: tuple[tuple[Device, ...], ...]
    tensor_split: TensorSplit
    single: Task

    @property
    def num_ranks(self) -> int:
        """Devices of the largest group."""
        return max(map(len, self.devices))

    @property
    def are_alike(self) -> bool:
        """Whether all groups are equally large."""
        return len({*map(len, self.devices)}) == 1

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
        idle = len(self.single.cluster.devices) - sum(map(len, self.devices))
        if idle and self.are_alike:
            yield (
                f"{width} {kind} ranks share each layer, so {idle} of the cluster's "
                f"{count_of(len(self.single.cluster.devices), 'device')} "
                f"{'is' if idle == 1 else 'are'} idle: no group is left for "
                f"{'it' if idle == 1 else 'them'}"
            )
        refused: dict[tuple[str, str], list[str]] = {}
        for layer in self.single.graph.layers:
            for part in () if layer.name in by_positions else layer.parts:
                why = part.refusal(width)
                if why:
                    refused.setdefault((part.kind, why), []).append(layer.name)
        *_, last = self.single.graph.layers
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


@dataclass(frozen=True)
class Cache:
    """Results that a task has worked out so far, by what they depend on.

    Attributes:
        cuts: the best ones of settings without limits.
        slowest: ``Task.least_slowest``, by the number of stages.
        offers: what was made of offers: candidates, or why there are none.
        shapes: replicas of each stage and devices of each rank that other planners would choose, in
            one entry when it is known; memory makes no difference.
        numbers: ``Task.numbers``, by a stage's first layer and the one behind its last.
        tables: ``Task.tables``, with as many rows as were asked for.
        held: bytes of a rank, by all that they depend on.
        hops: their seconds at each place, by the links that they may go over.
        links: the different ones between stages, by their devices.
        rank_places: where ranks are, by their devices.
        apart: ``Task.are_apart``, by the devices and how many pipelines there are.
        busy: ``Task.least_busy``, by what that depends on.
        excess: bytes by which any candidate misses a limit, in one entry when that is known.
        splits: ``Task.splits``, by a stage's first layer and the one behind its last.
        speeds: the slowest of some devices.
        kinds: ``Task.kind_of``, by the devices, and by their ``Task.appearance``.
        exchanges: how long copies exchange, by all that this depends on.
        levels: the ways to sum near ranks first, by the devices.
    """

    cuts: dict[object, list[tuple[int, ...]]] = field(default_factory=dict)
    slowest: dict[int, float] = field(default_factory=dict)
    offers: dict[object, Any] = field(default_factory=dict)
    shapes: list[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = field(default_factory=list)
    numbers: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    held: dict[object, int] = field(default_factory=dict)
    hops: dict[object, Floats] = field(default_factory=dict)
    links: dict[object, tuple[Link, ...]] = field(default_factory=dict)
    rank_places: dict[object, RankPlaces] = field(default_factory=dict)
    apart: dict[object, bool] = field(default_factory=dict)
    busy: dict[object, tuple[float, float]] = field(default_factory=dict)
    excess: list[float] = field(default_factory=list)
    splits: dict[tuple[int, int], dict[str, Split]] = field(default_factory=dict)
    speeds: dict[object, float] = field(default_factory=dict)
    kinds: dict[object, int] = field(default_factory=dict)
    exchanges: dict[object, Any] = field(default_factory=dict)
    levels: dict[object, list[Levels]] = field(default_factory=dict)


class KeptSchedules(dict[Hashable, Schedule]):
    """Schedules that were built without costs, by all that they depend on; no more of the oldest
    than memory has room for."""

    def keep(self, key: Hashable, schedule: Schedule) -> None:
        """Keep one more."""
        self[key] = schedule
        while len(self) > 1 and sum(kept.num_ops for kept in self.values()) > _MOST_KEPT_OPS:
            del self[next(iter(self))]


@dataclass(frozen=True)
class Task:
    """A model, a cluster and a minibatch, for which a plan is to be made.

    Attributes:
        graph: the profile, with microbatches of one size.
        cluster: the devices.
        num_microbatches: how many a minibatch has.
        memory_bytes: what a device may use, on top of the cluster's own limits.
        communication: how gradients and outputs are counted.
        marks: numbers of layers with which stages must be able to begin.
        near: cuts; where not every layer can be a place to cut, those around these are.
        groups: where each device stands for several that share layers: which, and how.
        reducer: how copies of a stage sum gradients.
        stale: by how many updates the gradients of a copy may be late.
        gathered_for: how long fully sharded weights stay gathered.
        hybrid: whether they are sharded inside hosts only.
        cuts_between: which parts of the model, where another engine is to run it.
        expert_ranks: how many copies of a stage divide its experts; the graph says what that costs.
        undivided: the task in which each has all of them.
        schedules: those that were built for this task, or for others that were made of the same.
    """

    graph: LayerGraph
    cluster: Cluster
    num_microbatches: int
    memory_bytes: int | None = None
    communication: CostModel = field(default_factory=lambda: cost_model("ring", overlap=0.0))
    marks: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    groups: TensorGroups | None = None
    reducer: ReducerName = "owners"
    stale: int = 0
    gathered_for: GatheredFor = "step"
    hybrid: bool = False
    cuts_between: CutsBetween = "layers"
    expert_ranks: int = 1
    undivided: Task | None = None
    schedules: KeptSchedules = field(default_factory=KeptSchedules, compare=False, repr=False)

    @property
    def alone(self) -> Task:
        """The task in which no device has a part of a layer."""
        return self.groups.single if self.groups is not None else self.undivided or self

    @property
    def num_tensor_ranks(self) -> int:
        """The most devices that share layers."""
        return 1 if self.groups is None else self.groups.num_ranks

    def num_devices_at(self, index: int) -> int:
        """How many devices one device of the cluster stands for; the same groups again where the
        cluster has been made several times as large."""
        if self.groups is None:
            return 1
        return len(self.groups.devices[index % len(self.groups.devices)])

    def num_on_card(self, index: int) -> int:
        """How many of the devices that one device of the cluster stands for share a network
        card, of that which most share."""
        if self.groups is None:
            return 1
        return self._on_cards[index % len(self._on_cards)]

    @cached_property
    def _on_cards(self) -> tuple[int, ...]:
        assert self.groups is not None, "nobody asks who stands for himself"
        single = self.groups.single
        names = (device.name for device in single.cluster.devices)
        card_of = dict(zip(names, single.topology.cards, strict=True))
        cards = ([card_of[part.name] for part in own] for own in self.groups.devices)
        # Where nobody says, they share one.
        return tuple(max(Counter(own).values()) for own in cards)

    def devices_at(self, index: int) -> tuple[Device, ...]:
        """The devices that one device of the cluster stands for."""
        return (self.cluster.devices[index],) if self.groups is None else self.groups.devices[index]

    @cached_property
    def straddling(self) -> frozenset[int]:
        """The devices that stand for groups whose devices are on several hosts."""
        if self.groups is None:
            return frozenset()
        single = self.groups.single
        names = (device.name for device in single.cluster.devices)
        host_of = dict(zip(names, single.topology.hosts, strict=True))
        apart = [len({host_of[part.name] for part in own}) > 1 for own in self.groups.devices]
        every = range(len(self.cluster.devices))
        return frozenset(device for device in every if apart[device % len(apart)])

    @cached_property
    def topology(self) -> Topology:
        """How the devices are joined."""
        return Topology(self.cluster)

    @cached_property
    def cache(self) -> Cache:
        """The results that this task has worked out so far."""
        return Cache()

    @cached_property
    def num_layers(self) -> int:
        """How many layers the model has."""
        return len(self.graph.layers)

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """Bytes that each device may use."""
        everywhere = self.memory_bytes or inf
        return tuple(min(device.memory_bytes or inf, everywhere) for device in self.cluster.devices)

    @cached_property
    def tensor_limits(self) -> tuple[float, ...]:
        """The ``limits`` without what allocators take besides tensors."""
        return tuple(
            limit / (1 + device.allocator_slack)
            for limit, device in zip(self.limits, self.cluster.devices, strict=True)
        )

    @cached_property
    def memories(self) -> tuple[tuple[float, float], ...]:
        """(bytes that each device may use, what its allocator takes besides): all of a device that
        decides what fits."""
        slacks = (device.allocator_slack for device in self.cluster.devices)
        return tuple(zip(self.limits, slacks, strict=True))

    @cached_property
    def different_memories(self) -> frozenset[tuple[float, float]]:
        """The ``memories``, each once."""
        return frozenset(self.memories)

    def memories_of(self, devices: tuple[int, ...]) -> Collection[tuple[float, float]]:
        """The ``memories`` of some devices, each once, or more often."""
        if len(self.different_memories) == 1:
            return self.different_memories
        return [self.memories[device] for device in devices]

    def appearance(self, devices: Iterable[int]) -> Hashable:
        """All by which devices in an order differ from others: equal ones in equal groups may stand
        for each other."""
        places: dict[int, int] = {}
        return tuple(
            (
                self._looks[device],
                *(places.setdefault(number, len(places)) for number in self.topology.paths[device]),
            )
            for device in devices
        )

    @cached_property
    def _looks(self) -> tuple[int, ...]:
        """A number for each device that it has in common with those that are like it, and in groups
        like its own."""
        groups, known = self.cluster.groups, dict[Hashable, int]()
        wired = {device for pair in self.topology.wires for device in pair}
        looks = (
            (
                device.speed,
                device.kind,
                self.memories[index],
                self.num_devices_at(index),
                self.num_on_card(index),
                index if index in wired else -1,
                *(
                    (group.link, group.kind, group.memory_bytes, group.card)
                    for group in map(groups.__getitem__, self.topology.paths[index])
                ),
            )
            for index, device in enumerate(self.cluster.devices)
        )
        return tuple(known.setdefault(look, len(known)) for look in looks)

    @cached_property
    def is_flat(self) -> bool:
        """Whether all devices look alike, and none is nearer to another one than to the rest."""
        alone = Counter(number for path in self.topology.paths for number in path)
        return len({*self._looks}) == 1 and {*alone.values()} <= {1, len(self._looks)}

    def kind_of(self, devices: tuple[int, ...]) -> int:
        """A number that some devices have in common with all that look like them."""
        kinds = self.cache.kinds
        if devices not in kinds:
            looks = "looks", self.appearance(devices)
            kinds[devices] = kinds.setdefault(looks, len(kinds))
        return kinds[devices]

    def slowest_speed(self, devices: tuple[int, ...]) -> float:
        """The speed of the slowest of some devices."""
        if devices not in self.cache.speeds:
            slowest = min(self.cluster.devices[device].speed for device in devices)
            self.cache.speeds[devices] = slowest
        return self.cache.speeds[devices]

    def rank_places(self, devices: tuple[int, ...]) -> RankPlaces:
        """Where ranks on these devices are."""
        if devices not in self.cache.rank_places:
            places = RankPlaces.on(self.topology, devices, self.straddling)
            self.cache.rank_places[devices] = places
        return self.cache.rank_places[devices]

    def levels(self, devices: tuple[int, ...]) -> list[Levels]:
        """The ways to sum near ranks first, where ranks are on these devices."""
        if devices not in self.cache.levels:
            ways = levels_worth_trying(self.topology, devices, self.straddling)
            self.cache.levels[devices] = ways
        return self.cache.levels[devices]

    def are_apart(self, devices: tuple[int, ...], num_pipelines: int) -> bool:
        """Whether pipelines side by side never wait for each other on their way.

        Args:
            devices: of each rank; copies of a rank follow one another.
        """
        key = devices, num_pipelines
        if key not in self.cache.apart:
            cards, hosts = self.rank_places(devices)
            self.cache.apart[key] = not cards or are_apart(cards, hosts, num_pipelines)
        return self.cache.apart[key]

    def splits(self, start: int, stop: int) -> dict[str, Split]:
        """How a group shares the layers ``[start, stop)``, as a plan says it; nothing is shared
        where devices stand for themselves."""
        if self.groups is None:
            return {}
        if (start, stop) not in self.cache.splits:
            names = [layer.name for layer in self.graph.layers[start:stop]]
            self.cache.splits[start, stop] = self.groups.splits(names)
        return self.cache.splits[start, stop]

    @cached_property
    def crossing_bytes(self) -> tuple[int, ...]:
        """Bytes that cross the cut in front of each layer; 0 in front of the first."""
        return (0, *self.graph.crossing_bytes)

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

    def longer_collectives(self, name: str, start: int, stop: int, speed: float) -> float:
        """What communication takes longer than ``sum`` has it, where the devices of a stage have
        another speed than those for which layers were split; as long as in the profile.

        Args:
            name: of the seconds of a layer.
            speed: of the slowest of the devices.
        """
        if self.groups is None or speed == self.groups.tensor_split.speed:
            return 0.0
        split, layers = self.groups.tensor_split, self.graph.layers[start:stop]
        own = (split.collectives.get(layer.name, {}).get(name, 0.0) for layer in layers)
        return (speed / split.speed - 1) * sum(own)

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
        whole = 0, self.num_layers
        return int(self.trained_bytes(*whole) + self.sum("buffer_bytes", *whole))

    def ways_in(self, name: str, count: int) -> float:
        """The seconds of no layer, of the first, of the first two, and so on, together: of so many
        ways, each of which has a layer more.

        Args:
            name: of the seconds.
        """
        return sum(self.sums[name][:count])

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

    def least_slowest(self, num_stages: int) -> float:
        """Forward and backward of a microbatch on the slowest of so many stages, at least, on
        devices of the profile's speed."""
        if num_stages not in self.cache.slowest:
            mean, most = sum(self.compute_seconds) / num_stages, max(self.compute_seconds)
            self.cache.slowest[num_stages] = (
                max(mean, most)
                if self.is_coarse or num_stages > self.num_layers
                else least_slowest(self.compute_seconds, num_stages)
            )
        return self.cache.slowest[num_stages]

    def activation_bytes(self, start: int, stop: int) -> int:
        """Bytes that a microbatch keeps at a stage with layers ``[start, stop)``."""
        # A stage hands back the gradient of its input, so it holds that whatever its layers keep.
        held = self.graph.layers[start].held_input_bytes
        return int(self.sum("activation_bytes", start, stop)) + held

    @cached_property
    def least_forward_share(self) -> float:
        """The share of a layer's forward in its compute, where it is least."""
        pairs = zip(self.graph.layers, self.compute_seconds, strict=True)
        return min((layer.forward_seconds / whole for layer, whole in pairs if whole), default=1.0)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where the exact search may cut, the two ends of the model included: everywhere in a model
        of up to ``_MOST_PLACES`` layers; in a longer one around ``near``, or else in as many places
        between which compute and memory are alike. Any other cut can be asked for and moved to."""
        count, most = self.num_layers, self._most_places
        if count <= most:
            return tuple(place for place in range(count + 1) if place not in self.inside)
        chosen = (
            places_near(self.near, count, most) if self.near else spread_places(self.graph, most)
        )
        return tuple(sorted({0, count, *self.marks} | (chosen - self.inside)))

    @cached_property
    def inside(self) -> frozenset[int]:
        """The layers with which no stage may begin, but those that were asked for."""
        names = [layer.name for layer in self.graph.layers]
        return places_inside(names, self.cuts_between) - {*self.marks}

    @property
    def is_coarse(self) -> bool:
        """Whether there are layers between which the exact search does not cut."""
        return self.num_layers > self._most_places

    @property
    def _most_places(self) -> int:
        # As many stages as devices must be possible, with some choice.
        return max(_MOST_PLACES, 2 * len(self.cluster.devices))

    def numbers(self, start: int, stop: int) -> dict[str, float]:
        """The sums that ``tables`` has, by their names, for one stage with layers ``[start,
        stop)``, wherever these begin and end."""
        bounds = start, stop
        if bounds not in self.cache.numbers:
            self.cache.numbers[bounds] = {
                **{name: self.sum(name, start, stop) for name in self.sums},
                "activation_bytes": self.activation_bytes(start, stop),
                "again_input_bytes": self.again_input_bytes(start, stop),
                "workspace_bytes": self.workspace_bytes(start, stop, again=False),
                "again_workspace_bytes": self.workspace_bytes(start, stop, again=True),
                "largest_bytes": max(
                    layer.parameter_bytes for layer in self.graph.layers[start:stop]
                ),
                "largest_gradient_bytes": max(
                    layer.summed_bytes for layer in self.graph.layers[start:stop]
                ),
                "tied_bytes": sum(tie.num_bytes for tie in self.ties if tie.is_parted(start, stop)),
            }
        return self.cache.numbers[bounds]

    def tables(self, num_rows: int) -> dict[str, Table]:
        """The results of ``numbers``, and a stage's ``input_bytes``, for all stages between two of
        ``places`` that have up to so many of what is between two; kept for whoever asks for fewer.
        Where there is no such stage, there is any number."""
        known = self.cache.tables
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

    def pace(self, devices: tuple[int, ...], used: Collection[int], mode: Mode) -> Pace:
        """The factors on the profile's seconds on the slowest of a stage's devices.

        Args:
            used: by the whole plan.
        """
        slowest = self.slowest_speed(devices)
        if not self._is_crowded(devices, used):
            return Pace(1 / slowest, 1 / slowest)
        contention = self.graph.contention
        return Pace(contention.of_passes(mode) / slowest, contention.of_updates(mode) / slowest)

    def least_busy(
        self, devices: tuple[int, ...], modes: tuple[Mode, ...], num_pipelines: int
    ) -> tuple[float, float]:
        """(seconds that a minibatch takes at least, however its stages are cut, with all of these
        devices busy all the time; the least factor on the seconds of passes on any of them).

        Args:
            modes: in one of which ranks work.
            num_pipelines: side by side, each with microbatches of its own.
        """
        key = devices, modes, num_pipelines
        if key not in self.cache.busy:
            paces = [self.least_paces(devices, mode) for mode in modes]
            turns = (
                len(range(own, self.num_microbatches, num_pipelines))
                / max(sum(1 / pace for pace in of_mode[own::num_pipelines]) for of_mode in paces)
                for own in range(num_pipelines)
            )
            busy = max(turns) * sum(self.compute_seconds)
            self.cache.busy[key] = busy, min(map(min, paces))
        return self.cache.busy[key]

    def least_paces(self, used: Sequence[int], mode: Mode) -> list[float]:
        """The least factor on the seconds of passes at any stage that has each device of those that
        are used."""
        # Who works beside one that shares its host counts as if it did, too.
        crowded = self.graph.contention.of_passes(mode)
        if not self.topology.shared_memories:
            least = min(1.0, crowded)
            return [least / self.cluster.devices[device].speed for device in used]
        return [
            min(
                self.pace((device,), used, mode).passes,
                crowded / self.cluster.devices[device].speed,
            )
            for device in used
        ]

    def _is_crowded(self, devices: Collection[int], used: Collection[int]) -> bool:
        """Whether one of them shares its host's memory with another one that works."""
        return any(
            sum(map(self.num_devices_at, set(host) & set(used))) > 1 and set(host) & set(devices)
            for host, _ in self.topology.shared_memories
        )

    def link_between(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        num_bytes: int,
        *,
        in_turns: bool = False,
    ) -> Link:
        """The slowest link over which a message may travel from one stage's devices to another's.

        Args:
            in_turns: whether microbatches go round both, so that not everybody meets everybody.
        """
        links = self._links_between(tuple(sources), tuple(targets), in_turns)
        return max(links, key=lambda link: link.seconds(num_bytes), default=Link())

    def _links_between(
        self, sources: tuple[int, ...], targets: tuple[int, ...], in_turns: bool
    ) -> tuple[Link, ...]:
        """The different links between two stages' devices, worked out once for all cuts."""
        key = sources, targets, in_turns
        if key in self.cache.links:
            return self.cache.links[key]
        if in_turns:
            links: Iterable[Link] = links_in_turns(self.topology, sources, targets)
        elif len(sources) * len(targets) > MANY_PAIRS:
            links = dict.fromkeys(self.topology.links_among({*sources, *targets}))
        else:
            pairs = (pair for pair in product(sources, targets) if len({*pair}) > 1)
            links = dict.fromkeys(self.topology.link(*pair) for pair in pairs)
        self.cache.links[key] = tuple(links)
        return self.cache.links[key]

    def hops(self, sources: tuple[int, ...], targets: tuple[int, ...], *, in_turns: bool) -> Floats:
        """Seconds from a stage to the next if it ends at each place; one array for all stages that
        are joined alike."""
        key = self._links_between(sources, targets, in_turns)
        if key not in self.cache.hops:
            seconds = (
                self.hop(stop, sources, targets, in_turns=in_turns)[0]
                if 0 < stop < self.num_layers
                else 0.0
                for stop in self.places
            )
            self.cache.hops[key] = np.array([*seconds])
        return self.cache.hops[key]

    def hop(
        self, stop: int, sources: Sequence[int], targets: Sequence[int], *, in_turns: bool = False
    ) -> tuple[float, float]:
        """(seconds until the output of the layers before ``stop`` can be used by others, how long
        that keeps the link busy); see ``link_between``."""
        num_bytes = self.crossing_bytes[stop]
        link = self.link_between(sources, targets, num_bytes, in_turns=in_turns)
        seconds, busy = link.seconds(num_bytes), link.seconds(num_bytes) - link.latency_seconds
        # A link with a latency was measured as a whole; one without does not know what handing a
        # message to another worker costs, but the profile does.
        return (seconds if link.latency_seconds else seconds + self.graph.hop_seconds), busy


def _again_seconds(layer: Layer) -> float:
    return layer.forward_seconds if layer.recompute_seconds is None else layer.recompute_seconds
