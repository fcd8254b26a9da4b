"""Placements of a branching graph on devices: which are pipelines, and a budget to try some of
them.

Layers are nodes of a graph without cycles. Small neighbours are put together into groups first,
then each group goes to a device (``Space``). The devices make a pipeline if no data would have to
come back: if the graph of devices, an edge wherever one reads from another, has no cycle. Their
topological order is that of the stages. Prefixes of the execution order are a part of these
placements; on a chain they are all of them.

Placers draw such maps and have them scored. A ``Ledger`` keeps to a budget of scores and remembers
the best; the caller brings the score, for example a simulated step under ``stage_costs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import inf

from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Link
from penstock.core.graph import LayerGraph
from penstock.core.timing.costs import Costs
from penstock.planning.partition.layers import reads_of, skips_of

Stages = tuple[tuple[str, ...], ...]
"""Names of layers, stage by stage; within a stage in execution order."""

Score = Callable[[Stages], float]
"""Seconds of a step with these stages; less is better."""


def stage_costs(graph: LayerGraph, stages: Stages, link: Link | None = None) -> Costs:
    """The durations of stages that need not be consecutive layers, for the simulator.

    Args:
        stages: as ``learned_placement`` returns them.
        link: between neighbouring stages; costs nothing by default. A hop carries every output
            before it that is read behind it, once, and every skip.

    Raises:
        InputError: a layer is missing, unknown or twice, or a stage reads from a later one.
    """
    stage_of = _stage_of(graph, stages)
    hops = [0.0] * (len(stages) - 1)
    if link is not None:
        hops = [link.seconds(size) for size in _crossing(graph, stage_of, len(stages))]
    forward, inputs, weights, updates = ([0.0] * len(stages) for _ in range(4))
    for layer, stage in zip(graph.layers, stage_of, strict=True):
        forward[stage] += layer.forward_seconds
        inputs[stage] += layer.backward_input_seconds
        weights[stage] += layer.backward_weight_seconds
        updates[stage] += layer.update_seconds
    return Costs(forward, inputs, weights, hop=hops or 0.0, update=updates)


def _stage_of(graph: LayerGraph, stages: Stages) -> list[int]:
    """The stage of each layer, in execution order."""
    home = {name: stage for stage, names in enumerate(stages) for name in names}
    expected = [layer.name for layer in graph.layers]
    if sorted(name for names in stages for name in names) != sorted(expected):
        raise InputError("the stages do not hold every layer of the graph exactly once")
    stage_of = [home[name] for name in expected]
    for source, reader in _edges(graph):
        if stage_of[source] > stage_of[reader]:
            raise InputError(
                f"layer {expected[reader]!r} in stage {stage_of[reader]} reads "
                f"{expected[source]!r} of the later stage {stage_of[source]}"
            )
    return stage_of


def _edges(graph: LayerGraph) -> tuple[tuple[int, int], ...]:
    return (*reads_of(graph), *((source, reader) for source, reader, _ in skips_of(graph)))


def _crossing(graph: LayerGraph, stage_of: Sequence[int], num_stages: int) -> list[int]:
    """Bytes over each border between neighbouring stages."""
    last = list(stage_of)
    for source, reader in reads_of(graph):
        last[source] = max(last[source], stage_of[reader])
    outputs = (layer.output_bytes for layer in graph.layers)
    spans = list(zip(stage_of, last, outputs, strict=True))
    spans += [(stage_of[a], stage_of[b], size) for a, b, size in skips_of(graph)]
    change = [0] * num_stages
    for start, stop, size in spans:
        change[start] += size
        change[stop] -= size
    return list(accumulate(change[: num_stages - 1]))


@dataclass(frozen=True)
class Space:
    """Groups of layers and the edges between them.

    Attributes:
        graph: the profile.
        groups: places of layers, ascending within a group; groups in a topological order.
        num_devices: at most so many stages.
    """

    graph: LayerGraph
    groups: tuple[tuple[int, ...], ...]
    num_devices: int

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(producer, reader) between groups, each once."""
        home = {layer: group for group, layers in enumerate(self.groups) for layer in layers}
        pairs = {(home[a], home[b]) for a, b in _edges(self.graph)}
        return tuple(sorted((a, b) for a, b in pairs if a != b))

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """Whom each group reads from."""
        producers: list[list[int]] = [[] for _ in self.groups]
        for source, reader in self.edges:
            producers[reader].append(source)
        return tuple(map(tuple, producers))

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Forward and backward of each group."""
        layers = self.graph.layers
        return tuple(sum(layers[layer].compute_seconds for layer in group) for group in self.groups)

    def order_of(self, devices: Sequence[int]) -> tuple[int, ...] | None:
        """The devices in use, in a topological order (of several, the one whose groups come
        first); ``None`` if data would have to come back, so that they are no pipeline.

        Args:
            devices: of each group.
        """
        readers: dict[int, set[int]] = {device: set() for device in devices}
        for source, reader in self.edges:
            if devices[source] != devices[reader]:
                readers[devices[source]].add(devices[reader])
        waits = dict.fromkeys(readers, 0)
        for targets in readers.values():
            for target in targets:
                waits[target] += 1
        first = {device: group for group, device in reversed(list(enumerate(devices)))}
        ready = [(first[device], device) for device, count in waits.items() if not count]
        heapify(ready)
        order = []
        while ready:
            _, device = heappop(ready)
            order.append(device)
            for target in readers[device]:
                waits[target] -= 1
                if not waits[target]:
                    heappush(ready, (first[target], target))
        return tuple(order) if len(order) == len(readers) else None

    def backward_share(self, devices: Sequence[int]) -> float:
        """The share of edges that lead to a device with a lower number."""
        back = sum(devices[source] > devices[reader] for source, reader in self.edges)
        return back / max(1, len(self.edges))

    def stages_of(self, devices: Sequence[int], order: Sequence[int]) -> Stages:
        """The names of the layers on each device, in the order given."""
        held: dict[int, list[int]] = {device: [] for device in order}
        for group, device in zip(self.groups, devices, strict=True):
            held[device] += group
        names = [layer.name for layer in self.graph.layers]
        return tuple(tuple(names[layer] for layer in sorted(held[device])) for device in order)


def make_space(
    graph: LayerGraph, num_devices: int, *, max_groups: int = 40, tiny: float = 0.005
) -> Space:
    """Put neighbouring layers together until there are few groups and none is tiny.

    The lightest group joins the lighter of its latest producer and its earliest reader. Neither can
    close a cycle: a second way between the two would have to lead through a later producer, or an
    earlier reader.

    Args:
        num_devices: at least 1; there are never fewer groups than that if there are as many
            layers.
        max_groups: go on until there are no more.
        tiny: go on while the lightest group has less than this share of all compute.

    Raises:
        InputError: a count below 1, or ``tiny`` outside of 0…1.
        PlanError: fewer layers than devices.
    """
    if num_devices < 1 or max_groups < num_devices or not 0 <= tiny <= 1:
        raise InputError(
            f"num_devices {num_devices}, max_groups {max_groups}, tiny {tiny}: give at least one "
            "device, no fewer groups than devices, and a share between 0 and 1"
        )
    if len(graph.layers) < num_devices:
        raise PlanError(
            f"{len(graph.layers)} layers cannot fill {num_devices} devices; ask for fewer devices"
        )
    space = Space(graph, tuple((layer,) for layer in range(len(graph.layers))), num_devices)
    total = sum(space.seconds)
    while len(space.groups) > num_devices:
        lightest = min(range(len(space.groups)), key=space.seconds.__getitem__)
        if len(space.groups) <= max_groups and space.seconds[lightest] >= tiny * total:
            break
        space = _joined(space, lightest)
    return space


def _joined(space: Space, group: int) -> Space:
    readers = [reader for source, reader in space.edges if source == group]
    near = [*sorted(space.producers[group])[-1:], *sorted(readers)[:1]]
    # A group without edges may join any.
    partner = min(near or [group - 1 if group else 1], key=space.seconds.__getitem__)
    merged = tuple(sorted(space.groups[group] + space.groups[partner]))
    rest = [own for index, own in enumerate(space.groups) if index not in (group, partner)]
    return Space(space.graph, _sorted_groups(space.graph, [*rest, merged]), space.num_devices)


def _sorted_groups(
    graph: LayerGraph, groups: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """The groups in the topological order that is nearest to that of execution."""
    space = Space(graph, tuple(sorted(groups)), len(groups))
    order = space.order_of(range(len(groups)))
    assert order is not None  # joining closes no cycle
    return tuple(space.groups[group] for group in order)


_PATIENCE = 50
"""Draws per score of the budget, after which a placer gives up finding anything new."""


@dataclass(frozen=True)
class Placed:
    """The best that a placer found.

    Attributes:
        stages: names of layers, stage by stage, in the order in which devices hand data on.
        seconds: its score.
        history: the best score so far, after each one.
        num_draws: placements drawn, valid or not, new or not.
        num_invalid: how many of these were no pipeline.
    """

    stages: Stages
    seconds: float
    history: tuple[float, ...]
    num_draws: int
    num_invalid: int


@dataclass
class Ledger:
    """Scores within a budget, and remembers them: a placement is paid for once.

    Attributes:
        score: what is made small.
        budget: how often it may be asked.
    """

    score: Score
    budget: int
    known: dict[Stages, float] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)
    best: Stages = ()
    num_draws: int = 0
    num_invalid: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may be asked, or asking has long been of no use."""
        spent = len(self.history) >= self.budget
        return spent or self.num_draws >= _PATIENCE * self.budget

    @property
    def num_stale(self) -> int:
        """Draws of placements that were known."""
        return self.num_draws - self.num_invalid - len(self.history)

    def ask(self, stages: Stages) -> float | None:
        """The score of a placement; ``None`` if the placement is new and the budget is spent."""
        self.num_draws += 1
        if stages not in self.known:
            if len(self.history) >= self.budget:
                return None
            seconds = self.known[stages] = self.score(stages)
            least = self.history[-1] if self.history else inf
            if seconds < least or not self.best:
                self.best = stages
            self.history.append(min(least, seconds))
        return self.known[stages]

    def refuse(self) -> None:
        """Count a draw that is no pipeline."""
        self.num_draws += 1
        self.num_invalid += 1

    @property
    def placement(self) -> Placed:
        """The best so far.

        Raises:
            PlanError: nothing valid was drawn.
        """
        if not self.best:
            raise PlanError(
                f"none of {self.num_draws} placements drawn was a pipeline; raise num_samples"
            )
        return Placed(
            self.best, self.known[self.best], tuple(self.history), self.num_draws, self.num_invalid
        )


Search = Callable[[Space, Ledger, int], None]
"""(groups of layers, ledger, seed): draws placements and has them scored until the ledger is spent.
"""


@dataclass(frozen=True)
class Placer:
    """A way to look for a good placement with a budget of scores.

    Attributes:
        search: what it draws; the same seed draws the same.
    """

    search: Search

    def __call__(
        self,
        graph: LayerGraph,
        num_devices: int,
        score: Score,
        *,
        num_samples: int = 400,
        seed: int = 0,
        max_groups: int = 40,
        tiny: float = 0.005,
    ) -> Placed:
        """The best placement that it drew.

        Args:
            graph: the profile, which may have branches (``Layer.inputs``) and skips.
            num_devices: at most so many stages.
            score: seconds of a step with given stages, for example a simulated makespan; less is
                better. Called once per placement, with pipelines only.
            num_samples: how many different placements to score.
            seed: of the draws; the same seed gives the same placement.
            max_groups: layers are put together until there are no more.
            tiny: and until no group has less than this share of the compute.

        Returns:
            The best one as stages, in the order in which devices hand data on, and how it was
            found.

        Raises:
            InputError: a count below 1.
            PlanError: fewer layers than devices, or no draw was a pipeline.
        """
        if num_samples < 1:
            raise InputError(f"num_samples is {num_samples}, but must be ≥ 1")
        space = make_space(graph, num_devices, max_groups=max_groups, tiny=tiny)
        ledger = Ledger(score, num_samples)
        self.search(space, ledger, seed)
        return ledger.placement
