"""DAPPLE's planner: cuts × replicas × devices of a chain for synchronous training, by a beam over
prefixes.

Fan et al., PPoPP 2021, arXiv 2007.01045, section 4.3. The paper's dynamic programme fixes stages
from the first to the last and keeps one plan for each prefix of layers and number of devices,
judged as if all that is left were one stage. Here a prefix keeps as many plans as the beam is wide
for each way in which the devices that are gone are spread over the servers, and what a plan carries
is all that the bound needs to go on; so a beam that drops nothing is exact. ``dapple_rules`` says
which devices the replicas of a stage may take, and how long a step is at least. Candidates come out
best first, for a simulator to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import nsmallest
from itertools import accumulate, combinations, product
from math import inf
from operator import add, le

from penstock.base.errors import InputError
from penstock.core.cluster import Cluster, Link, Topology
from penstock.core.graph import LayerGraph
from penstock.planning.partition.chain import CostModel, cost_model
from penstock.planning.partition.dapple_rules import (
    RULES,
    Reached,
    Rule,
    busiest,
    devices_of,
    servers,
    take,
)

__all__ = ["RULES", "DappleCandidate", "Rule", "dapple_candidates"]


StageFits = Callable[[int, int, int], bool]
"""(first layer, layer behind the last, replicas) → may a device hold this stage?"""

Devices = tuple[int, ...]

_ROUNDING = 1e-9
_NOTHING = Reached()
_FREE = Link()
_ALL_COUNTS = 8
"""With so many devices or fewer, every number of replicas is tried."""


@dataclass(frozen=True)
class DappleCandidate:
    """One way to cut, replicate and place a chain.

    Attributes:
        cuts: where stages begin and end, as ``balance`` gives them.
        replicas: how many each stage has.
        devices: those of each stage: places in ``Cluster.devices``, ascending.
        bound_seconds: no 1F1B step with these costs is shorter; what was made small.
    """

    cuts: tuple[int, ...]
    replicas: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    bound_seconds: float


@dataclass(frozen=True)
class _Prefix:
    """Stages so far.

    Attributes:
        cuts, devices: where they begin and end, and on which devices they are.
        used: devices that are gone, per server.
        reached: their bound, and what it needs to go on: the less the better, each.
    """

    cuts: tuple[int, ...] = (0,)
    devices: tuple[Devices, ...] = ()
    used: tuple[int, ...] = ()
    reached: Reached = _NOTHING

    @property
    def bound(self) -> float:
        """No step of these stages is shorter."""
        return self.reached.bound

    @property
    def shape(self) -> tuple[object, ...]:
        """A key that plans share which differ in the names of devices only."""
        return self.cuts, tuple(map(len, self.devices)), self.reached


@dataclass(frozen=True)
class _Chain:
    graph: LayerGraph
    topology: Topology
    model: CostModel
    num_microbatches: int
    fits: StageFits

    @cached_property
    def sums(self) -> tuple[tuple[float, ...], ...]:
        """Forward seconds, backward seconds and gradient bytes of the first k layers, summed."""
        layers = self.graph.layers
        columns = (
            (layer.forward_seconds for layer in layers),
            (layer.backward_seconds for layer in layers),
            (float(layer.summed_bytes) for layer in layers),
        )
        return tuple(tuple(accumulate(column, initial=0.0)) for column in columns)

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """Bytes behind each layer but the last."""
        return self.graph.crossing_bytes

    def times(self, start: int, stop: int, devices: Devices) -> tuple[float, float, float]:
        """Forward, backward and reduction of a stage on these devices; the slowest counts."""
        forward, backward, parameters = (sums[stop] - sums[start] for sums in self.sums)
        speed, links = self._facts(devices)
        link = _slowest(links, parameters)
        reduce = self.model.reduce_seconds(parameters, len(devices), link)
        return forward / speed, backward / speed, reduce

    def hop(self, stop: int, before: Devices, behind: Devices) -> tuple[float, float]:
        """Seconds from the output of layer ``stop − 1`` to the next stage, over the slowest link
        used, and for how many of them that link is busy."""
        size = self.crossing[stop - 1]
        link = _slowest(self._between(before, behind), size)
        hop = link.seconds(size)
        # As everywhere: a link without a latency does not know what a hand-over costs.
        overhead = 0.0 if link.latency_seconds else self.graph.hop_seconds
        return hop + overhead, hop - link.latency_seconds

    @cached_property
    def _facts(self) -> Callable[[Devices], tuple[float, frozenset[Link]]]:
        """The speed of the slowest of some devices, and the links among them."""

        def facts(devices: Devices) -> tuple[float, frozenset[Link]]:
            speed = min(self.topology.cluster.devices[device].speed for device in devices)
            return speed, frozenset(self.topology.link(*pair) for pair in combinations(devices, 2))

        return cache(facts)

    @cached_property
    def _between(self) -> Callable[[Devices, Devices], frozenset[Link]]:
        """The links from some devices to others."""

        def between(before: Devices, behind: Devices) -> frozenset[Link]:
            return frozenset(self.topology.link(*pair) for pair in product(before, behind))

        return cache(between)

    def extended(
        self, prefix: _Prefix, stop: int, devices: Devices, used: tuple[int, ...]
    ) -> _Prefix:
        """The prefix with one more stage."""
        start = prefix.cuts[-1]
        forward, backward, reduce = self.times(start, stop, devices)
        count, before = len(devices), prefix.devices[-1:]
        edge = self.hop(start, before[0], devices) if before else (0.0, 0.0)
        shares = busiest(self.num_microbatches, len(before[0]) if before else count, count)
        return _Prefix(
            (*prefix.cuts, stop),
            (*prefix.devices, devices),
            used,
            prefix.reached.then((forward, backward, reduce), edge, shares),
        )

    def promise(self, prefix: _Prefix) -> float:
        """No plan that begins so is shorter: what is left cannot be spread better than evenly."""
        left = sum(sums[-1] - sums[prefix.cuts[-1]] for sums in self.sums[:2])
        if not left:
            return prefix.bound
        free = self._speed_of_all - sum(map(self._speed_of, prefix.devices))
        if free <= _ROUNDING * self._speed_of_all:
            return inf
        even = self.num_microbatches * left / free
        return max(prefix.bound, prefix.reached.forward + even + prefix.reached.back)

    @cached_property
    def _speed_of_all(self) -> float:
        return sum(device.speed for device in self.topology.cluster.devices)

    @cached_property
    def _speed_of(self) -> Callable[[Devices], float]:
        devices = self.topology.cluster.devices
        return cache(lambda chosen: sum(devices[device].speed for device in chosen))


def dapple_candidates(
    graph: LayerGraph,
    cluster: Cluster,
    num_microbatches: int,
    *,
    model: CostModel | None = None,
    fits: StageFits | None = None,
    beam: int = 4,
    count: int = 8,
    max_cuts: int = 20,
) -> tuple[DappleCandidate, ...]:
    """The best few ways to cut, replicate and place a chain, judged by their bound.

    Each stage may follow another of the three rules of ``dapple.rules``. On 300 random chains
    of up to 6 layers on 2 servers of 2 devices, the default beam found the optimum over all cuts,
    replicas and rules; a wide enough one always does. Longer chains and more devices are thinned
    out first, so nothing is promised there; rank what comes back with the simulator.

    Args:
        graph: the profile; layers are cut in execution order.
        cluster: its innermost groups are the servers. Of a stage's devices and links the slowest
            counts.
        num_microbatches: per minibatch; a stage has at most so many replicas.
        model: how gradient exchanges are costed; ``ring`` by default.
        fits: whether a device may hold layers ``[start, stop)`` with so many replicas; asked with
            (start, stop, replicas).
        beam: prefixes kept for every last layer and number of devices that are gone.
        count: how many candidates to return.
        max_cuts: the most places to cut. Where there are more, those with the fewest crossing bytes
            in as many stretches of equal compute. On more than 8 devices, replica counts are powers
            of two, whole servers, all that is left, and all but one.

    Returns:
        Best first, all different; empty if nothing fits.

    Raises:
        InputError: a count below 1.
    """
    for name, value in (("num_microbatches", num_microbatches), ("beam", beam), ("count", count)):
        if value < 1:
            raise InputError(f"{name} is {value}, but must be ≥ 1")
    chain = _Chain(
        graph,
        Topology(cluster),
        model or cost_model("ring"),
        num_microbatches,
        fits or (lambda start, stop, replicas: True),
    )
    search = _BeamSearch(chain, servers(cluster), beam, count)
    stops = [*_places(chain, max_cuts), len(graph.layers)]
    for index, start in enumerate([0, *stops[:-1]]):
        search.grow(start, stops[index:])
    return tuple(
        DappleCandidate(prefix.cuts, tuple(map(len, prefix.devices)), prefix.devices, prefix.bound)
        for prefix in search.finished
    )


class _BeamSearch:
    """The beams, one for each (last layer, devices gone), and the best plans so far."""

    def __init__(
        self, chain: _Chain, groups: tuple[tuple[int, ...], ...], beam: int, count: int
    ) -> None:
        self.chain, self.groups, self.beam, self.count = chain, groups, beam, count
        self.sizes = [len(group) for group in groups]
        self.finished: list[_Prefix] = []
        self.beams: dict[int, dict[int, list[_Prefix]]] = {
            0: {0: [_Prefix(used=(0,) * len(groups))]}
        }

    def grow(self, start: int, stops: Sequence[int]) -> None:
        """Add a stage that begins at ``start`` to every prefix that ends there."""
        for prefixes in self.beams.pop(start, {}).values():
            for prefix in nsmallest(self.beam, _undominated(prefixes), key=self._rank):
                if self.chain.promise(prefix) < self._worst_kept:
                    for devices, used in self._choices(prefix):
                        self._extend(prefix, devices, used, stops)

    def _extend(
        self, prefix: _Prefix, devices: Devices, used: tuple[int, ...], stops: Sequence[int]
    ) -> None:
        start, last = prefix.cuts[-1], stops[-1]
        is_full = sum(used) == sum(self.sizes)
        for stop in [last] if is_full else stops:
            if not self.chain.fits(start, stop, len(devices)):
                continue
            longer = self.chain.extended(prefix, stop, devices, used)
            if longer.bound >= self._worst_kept:
                break  # a longer stage takes no less
            if stop == last:
                self._finish(longer)
            elif self.chain.promise(longer) < self._worst_kept:
                self.beams.setdefault(stop, {}).setdefault(sum(used), []).append(longer)

    @property
    def _worst_kept(self) -> float:
        return self.finished[-1].bound if len(self.finished) == self.count else inf

    def _finish(self, prefix: _Prefix) -> None:
        # Equal servers give the same plan several times.
        if all(known.shape != prefix.shape for known in self.finished):
            # Of equally long ones, the one with fewer devices is the better plan.
            self.finished.append(prefix)
            self.finished.sort(
                key=lambda plan: (plan.bound, sum(plan.used), plan.cuts, plan.devices)
            )
            del self.finished[self.count :]

    def _rank(self, prefix: _Prefix) -> tuple[float, ...]:
        """Less is more promising."""
        bound, ahead, back = prefix.reached
        return self.chain.promise(prefix), bound, ahead + back

    def _choices(self, prefix: _Prefix) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(devices of the next stage, devices gone with it), each once."""
        left = sum(self.sizes) - sum(prefix.used)
        for num_replicas in self._counts(left):
            ways = {take(rule, self.sizes, prefix.used, num_replicas) for rule in RULES}
            for taken in sorted(ways):
                used = tuple(map(add, prefix.used, taken))
                yield devices_of(self.groups, prefix.used, taken), used

    def _counts(self, left: int) -> list[int]:
        most = min(left, self.chain.num_microbatches)
        if sum(self.sizes) <= _ALL_COUNTS:
            return list(range(1, most + 1))
        powers = [2**power for power in range(most.bit_length())]
        whole = accumulate(sorted(self.sizes))
        counts = {*powers, *whole, left - 1, left}
        return sorted(count for count in counts if 1 <= count <= most)


def _slowest(links: Collection[Link], num_bytes: float) -> Link:
    if len(links) == 1:
        return next(iter(links))
    return max(links, key=lambda link: link.seconds(num_bytes), default=_FREE)


def _undominated(prefixes: Sequence[_Prefix]) -> list[_Prefix]:
    """Without those that are nowhere better than one with the same devices gone and at the end."""
    kept: dict[object, list[_Prefix]] = {}
    for prefix in sorted(prefixes, key=lambda prefix: prefix.reached):
        rivals = kept.setdefault((prefix.used, prefix.devices[-1:]), [])
        if not any(all(map(le, rival.reached, prefix.reached)) for rival in rivals):
            rivals.append(prefix)
    return [prefix for rivals in kept.values() for prefix in rivals]


def _places(chain: _Chain, max_cuts: int) -> list[int]:
    """Where a cut may be: everywhere, or at the lightest place of each stretch."""
    last = len(chain.graph.layers)
    if last - 1 <= max_cuts:
        return list(range(1, last))
    forward, backward, _ = chain.sums
    total = forward[-1] + backward[-1] or 1.0
    stretches: dict[int, list[int]] = {}
    for stop in range(1, last):
        share = (forward[stop] + backward[stop]) / total
        stretches.setdefault(min(max_cuts - 1, int(share * max_cuts)), []).append(stop)
    light = (min(stops, key=lambda stop: chain.crossing[stop - 1]) for stops in stretches.values())
    return sorted(light)
