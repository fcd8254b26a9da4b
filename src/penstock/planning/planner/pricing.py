"""The costs of a candidate's stages: seconds and bytes of layers on the devices of a setting, and
of each way to sum gradients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf
from typing import Any, NamedTuple

from penstock.core.cluster import Link, SpareMachine
from penstock.core.summation.split import (
    PART_OVERHEAD_SECONDS,
    best_part_bytes,
    best_split,
    num_portions,
)
from penstock.core.summation.tree import SumTree
from penstock.planning.partition.chain import RING
from penstock.planning.partition.experts import mean_loads
from penstock.planning.planner.hosts import (
    Levels,
    LevelSeconds,
    level_seconds,
)
from penstock.planning.planner.setting import Setting
from penstock.planning.planner.task import Task
from penstock.planning.plans.stage_plan import RecomputeWay, StagePlan
from penstock.planning.plans.summing import (
    BY_SHARE,
    ReducerName,
    Summing,
    exchanged_bytes,
    room_to_sum,
    weights_held,
)


class ExchangeSeconds(NamedTuple):
    """How long one exchange among copies takes, without the additions that it waits for.

    Attributes:
        between: on the links between hosts, or between all where none are near each other.
        inside: on those inside hosts.
        back: in the other direction, which what comes first takes while the rest still leaves.
        latency: of its messages.
    """

    between: float
    inside: float = 0.0
    back: float = 0.0
    latency: float = 0.0

    @property
    def total(self) -> float:
        """All of it, one after another."""
        return self.between + self.inside + self.back + self.latency


@dataclass(frozen=True)
class SummedSetting:
    """How gradients are summed in one setting.

    Attributes:
        task: what is planned.
        reducer: how they are summed.
        devices: of each rank.
        num_sums: stages whose copies sum; servers divide their time among them.
        levels: which ranks are near each other, as ``Summing`` has it.
    """

    task: Task
    reducer: ReducerName
    devices: tuple[int, ...] = ()
    num_sums: int = 1
    levels: Levels = ()

    def optimizer_bytes(self, whole: float, ranks: Sequence[int]) -> int:
        """Bytes of optimizer state on each copy of a stage that needs ``whole`` in all."""
        if self.reducer == "parameter-server" and len(ranks) > 1:
            return 0
        return ceil(whole / len(self.sharing(ranks))) if self.reducer in BY_SHARE else ceil(whole)

    def sharing(self, ranks: Sequence[int]) -> Sequence[int]:
        """Copies of a stage that update it together: all, or those on the host of the first one
        where weights are fully sharded inside hosts."""
        if self.reducer != "fully-sharded":
            return ranks
        return SumTree.of(ranks, self.levels[-1:]).levels[0][0]

    @property
    def gathers_each_use(self) -> bool:
        """Whether copies gather the weights of a layer whenever they compute with it."""
        return self.reducer == "fully-sharded" and self.task.gathered_for == "use"

    def gather_seconds(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """How long it takes to gather weights: half of an exchange; 0 where copies keep them all.

        Args:
            num_bytes: of the weights.
        """
        if self.reducer != "fully-sharded" or len(self.sharing(ranks)) < 2 or not num_bytes:
            return 0.0
        return self.exchange(num_bytes, self.sharing(ranks)).total / 2

    def shard_seconds(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """How long it takes until each of fully sharded copies has the sum of its shard: the other
        half of an exchange, and all of that between hosts which have the same shards.

        Args:
            num_bytes: of the gradients.
        """
        if len(ranks) < 2 or not num_bytes:
            return 0.0
        exchange = self.exchange(num_bytes, ranks)
        if not self.levels:
            return exchange.total / 2
        return exchange.between + exchange.inside / 2 + exchange.latency

    def update_seconds(self, whole: float, ranks: Sequence[int]) -> float:
        """Seconds of an update where a copy that updates everything takes ``whole``."""
        if self.reducer == "parameter-server" and len(ranks) > 1:
            return whole / self._num_servers
        return whole / len(self.sharing(ranks)) if self.reducer in BY_SHARE else whole

    def num_parts(self, num_bytes: float, ranks: Sequence[int], exchange: ExchangeSeconds) -> int:
        """In how many parts gradients leave while the last backward makes them; 1 where they leave
        when it is done.

        Args:
            exchange: how long that of so many bytes among these ranks takes.
        """
        devices_here = [self.task.cluster.devices[device] for device in self._devices_of(ranks)]
        model = self.task.communication
        if any(device.kind == "gpu" for device in devices_here) or model.name != RING:
            return 1  # an accelerator's gradients leave when all have been asked for
        if self.reducer == "fully-sharded":
            return 1  # what hides is counted layer by layer
        # Whoever says what share hides has said it all; nothing that takes no time can hide.
        if model.overlap or not exchange.total:
            return 1
        return num_portions(num_bytes)

    def passes_cards(self, ranks: Sequence[int]) -> bool:
        """Whether copies exchange through cards that others may share."""
        topology, devices = self.task.topology, self._devices_of(ranks)
        hosts = {topology.hosts[device] for device in devices}
        has_cards = any(topology.cards[device] >= 0 for device in devices)
        return len(hosts) > 1 and has_cards and self.task.communication.name == RING

    def exchange(self, num_bytes: float, ranks: Sequence[int]) -> ExchangeSeconds:
        """How long one exchange among copies takes; worked out once for all that are alike."""
        known = self.task.cache.exchanges
        key = num_bytes, self._looks_of(ranks)
        if key not in known:
            known[key] = self._exchange(num_bytes, ranks)
        seconds: ExchangeSeconds = known[key]
        return seconds

    def _looks_of(self, ranks: Sequence[int]) -> Hashable:
        """All by which exchanges of some ranks differ from those of others, but their bytes."""
        levels = []
        for level in self.levels:
            numbers: dict[int, int] = {}
            levels.append(tuple(numbers.setdefault(level[k], len(numbers)) for k in ranks))
        devices = self.task.devices.kind_of(self._devices_of(ranks))
        return devices, tuple(levels), self.reducer, self.num_sums

    def _exchange(self, num_bytes: float, ranks: Sequence[int]) -> ExchangeSeconds:
        task, devices = self.task, self._devices_of(ranks)
        link = task.topology.slowest_link(devices, num_bytes)
        if self.reducer == "parameter-server" and len(devices) > 1:
            *inside, _ = self._by_levels(num_bytes, ranks)
            stepped = self._stepped_seconds(num_bytes, ranks)
            within = sum(level.seconds for level in inside)
            return ExchangeSeconds(stepped, within, stepped, 2 * link.latency_seconds)
        if self.reducer == "servers" and len(devices) > 1 and num_bytes:
            served = self._served(num_bytes, ranks, link)
            if served is not None:
                return served
        if task.communication.name != RING or not (self.levels or self.passes_cards(ranks)):
            latency = task.communication.reduce_seconds(0.0, len(devices), link)
            whole = task.communication.reduce_seconds(num_bytes, len(devices), link)
            return ExchangeSeconds(whole - latency, latency=latency)
        *inside, between = self._by_levels(num_bytes, ranks)
        return ExchangeSeconds(
            between.seconds,
            sum(level.seconds for level in inside),
            latency=between.latency + sum(level.latency for level in inside),
        )

    def _by_levels(self, num_bytes: float, ranks: Sequence[int]) -> list[LevelSeconds]:
        tree = SumTree.of(ranks, self.levels)
        width = max(self.task.devices.num_on_card(device) for device in self._devices_of(ranks))
        return level_seconds(self.task.topology, tree, self._device_of, num_bytes, width)

    def _served(self, num_bytes: float, ranks: Sequence[int], link: Link) -> ExchangeSeconds | None:
        """The exchange with servers, among machines; ``None`` where links take no time."""
        *inside, _ = self._by_levels(num_bytes, ranks)
        rates = self._rates_of_machines(ranks)
        if inf in rates:
            return None
        servers = self._rates_of(self.task.cluster.spares, self._devices_of(ranks))
        split = best_split(num_bytes, rates, servers)
        # A flow shop: besides the slowest link's work, the first part comes before anything can
        # be added, and the last one goes to all when all is added; and each part costs a little.
        size, slowest = best_part_bytes(num_bytes, min(rates), len(rates)), min(rates)
        parting = (len(rates) + 1) * min(size, num_bytes) / slowest
        overhead = PART_OVERHEAD_SECONDS * num_bytes / size
        return ExchangeSeconds(
            split.seconds + parting + overhead,
            sum(level.seconds for level in inside),
            latency=2 * link.latency_seconds + sum(level.latency for level in inside),
        )

    def _rates_of_machines(self, ranks: Sequence[int]) -> list[float]:
        """Bytes per second of each worker of servers: of the outermost groups, or of devices where
        none are near each other, which may share a card."""
        tree = SumTree.of(ranks, self.levels[-1:])
        groups = tree.levels[0] if tree.num_levels > 1 else tuple((rank,) for rank in tree.ranks)
        return [self._rate_of_machine(group, ranks) for group in groups]

    def _rate_of_machine(self, group: Sequence[int], ranks: Sequence[int]) -> float:
        """What devices can send together, each no faster than its link; of a card that others share
        they have their part."""
        topology, devices = self.task.topology, self._devices_of(group)
        everywhere = self._devices_of(ranks)
        width = max(map(self.task.devices.num_on_card, devices))
        own: dict[int, float] = {}
        for device in devices:
            card = topology.cards[device]
            own[card] = own.get(card, 0.0) + rate_of(self.task, device, everywhere)
        behind = Counter(topology.cards[device] for device in everywhere)
        here = Counter(topology.cards[device] for device in devices)
        return sum(
            rate
            if card < 0
            else min(rate, topology.card(card).bytes_per_second * here[card] / behind[card] / width)
            for card, rate in own.items()
        )

    @cached_property
    def _device_of(self) -> dict[int, int]:
        return dict(enumerate(self.devices))

    def _devices_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        if isinstance(ranks, range):
            return self.devices[ranks.start : ranks.stop]
        return tuple(self.devices[rank] for rank in ranks)

    @property
    def most_stale(self) -> int:
        """By how many updates gradients may be late."""
        return self.task.stale if self.reducer == "parameter-server" else 0

    @property
    def _num_servers(self) -> int:
        """Parameter servers, at least one."""
        return max(len(_spares_of(self.task)), 1)

    def _rates_of(self, spares: Sequence[SpareMachine], devices: Sequence[int]) -> list[float]:
        """Bytes per second that machines have for one sum: of each stage with copies, and of each
        tensor rank of one, there is a sum."""
        num_sums = self.num_sums * self.task.devices.num_behind(devices[0])
        return [spare.bytes_per_second / num_sums for spare in spares]

    def _stepped_seconds(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds until parameter servers have all gradients, or machines all weights.

        Each of k servers has an equal slice, of which every machine sends it what its devices have
        added. It steps bucket by bucket, so the two directions are busy at once.
        """
        rates = self._rates_of_machines(ranks)
        servers = self._rates_of(_spares_of(self.task), self._devices_of(ranks))
        own = num_bytes / min(rates)
        served = len(rates) * num_bytes / self._num_servers / min(servers, default=min(rates))
        return max(own, served)

    def added_bytes(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Bytes that whoever sums a slice adds up."""
        if self.reducer == "parameter-server":
            return (len(devices) - 1) / self._num_servers * num_bytes
        return (len(devices) - 1) / len(devices) * num_bytes


def _spares_of(task: Task) -> tuple[SpareMachine, ...]:
    """The machines that parameter servers run on: where they need not wait for all, one decides
    what each update gets."""
    return task.cluster.spares[:1] if task.stale else task.cluster.spares


def exposed_seconds(steps: Iterable[tuple[float, float]]) -> float:
    """How long steps wait in all for what each of them needs, which is asked for when the last one
    before it that needed something has begun.

    >>> exposed_seconds([(2.0, 5.0), (4.0, 1.0), (0.0, 1.0), (3.0, 1.0)])
    3.0

    Args:
        steps: of each, the seconds until what it needs is there, and those that it takes then.
    """
    waited = hidden = 0.0
    for fetch, compute in steps:
        waited += max(fetch - hidden, 0.0)
        hidden = compute if fetch else hidden + compute
    return waited


def rate_of(task: Task, device: int, others: Sequence[int]) -> float:
    """Bytes per second of a device's slowest link to others; infinite where links cost nothing."""
    links = (task.topology.link(device, other) for other in others if other != device)
    return min((link.bytes_per_second or inf for link in links), default=inf)


def written(
    task: Task, reducer: ReducerName, devices: Sequence[Sequence[int]], levels: Levels = ()
) -> Summing:
    """A way to sum, as a plan says it.

    Args:
        devices: of each rank, with the others that hold the same stage.
        levels: which ranks are near each other.
    """
    uses_spares = reducer in {"servers", "parameter-server"}
    servers: tuple[SpareMachine, ...] = _spares_of(task) if uses_spares else ()
    stale = task.stale if reducer == "parameter-server" else 0
    rates = [rate_of(task, own, group) for own, *group in devices] if reducer == "servers" else []
    known = not all(rate == inf for rate in rates)
    most = max((rate for rate in rates if rate < inf), default=0.0)
    # Who shares no stage sends no gradients; it only must have a number.
    given = tuple(most if rate == inf else rate for rate in rates) if known else ()
    return Summing(
        reducer=reducer,
        servers=servers,
        stale=stale,
        bytes_per_second=given,
        levels=levels,
        gathered_for=task.gathered_for if reducer == "fully-sharded" else "step",
    )


class _Reduced(NamedTuple):
    """How a stage's gradients are summed; see ``StagePlan``."""

    seconds: float
    num_parts: int = 1
    steps: tuple[float, ...] = ()


@dataclass(frozen=True)
class CutSetting:
    """A setting with its cuts, and what that costs before anything is known of the order of ops.

    Attributes:
        task: what is planned.
        setting: the schedule and its devices.
        cuts: where stages begin; the last entry is the number of layers.
        recomputes: what each stage runs again before its backward.
    """

    task: Task
    setting: Setting
    cuts: tuple[int, ...]
    recomputes: tuple[RecomputeWay, ...]

    @cached_property
    def way(self) -> SummedSetting:
        """How copies of stages sum their gradients: hosts first where that is quicker."""
        task, setting = self.task, self.setting
        shared = [stage for stage, ranks in enumerate(setting.ranks_of) if len(ranks) > 1]
        flat = SummedSetting(
            task, setting.reducer_of(task), setting.devices, num_sums=max(len(shared), 1)
        )
        if flat.reducer == "fully-sharded":
            return replace(flat, levels=setting.host_levels(task))
        if not shared or task.communication.name != RING:
            return flat
        choices = task.devices.levels(setting.devices)
        if len(choices) == 1:
            return replace(flat, levels=choices[0])

        def seconds(way: SummedSetting) -> float:
            return sum(
                way.exchange(
                    exchanged_bytes(
                        way.reducer,
                        task.layers.sum("gradient_bytes", *self.cuts[stage : stage + 2]),
                        task.layers.sum("parameter_bytes", *self.cuts[stage : stage + 2]),
                    ),
                    setting.ranks_of[stage],
                ).total
                for stage in shared
            )

        return min((replace(flat, levels=levels) for levels in choices), key=seconds)

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """The plan of each stage, with its predicted costs, in execution order."""
        return tuple(map(self._known_stage, range(len(self.recomputes))))

    def _known_stage(self, index: int) -> StagePlan:
        """The plan of a stage, made once for all cuts that give it the same layers. (What sums of
        tied weights take depends on where the other halves are.)"""
        if self.task.layers.ties:
            return self._stage(index)
        known = self.setting.stage_plans(self.task)
        key = index, *self.cuts[index : index + 2], self.recomputes[index], self.way.levels
        if key not in known:
            known[key] = self._stage(index)
        return known[key]

    def _stage(self, index: int) -> StagePlan:
        start, stop = self.cuts[index : index + 2]
        task, setting = self.task, self.setting
        layers = task.graph.layers[start:stop]
        names = tuple(layer.name for layer in layers)
        experts = [part for layer in layers for part in layer.experts]
        size = task.expert_ranks if experts else 1
        rank = setting.ranks_of[index][0]
        width = task.devices.num_behind(setting.devices_of[index][0])
        return StagePlan(
            layers=names,
            rank=rank,
            **self._seconds(index, start, stop),
            **self._bytes(index, start, stop),
            peak_activations=setting.peaks[setting.scheduled(rank)],
            weight_versions=setting.weight_versions(index, task.num_microbatches),
            recompute=self.recomputes[index],
            tensor_ranks=width,
            expert_ranks=size,
            expert_loads=mean_loads(experts, size) if experts else (),
            splits={} if width == 1 else task.splits(start, stop),
        )

    def _seconds(self, index: int, start: int, stop: int) -> dict[str, Any]:
        """The fields of a stage that say how long it takes."""
        task, setting, devices = self.task, self.setting, self.setting.devices_of[index]
        pace, more = task.pace(devices, setting.devices, setting.mode), task.graph.op_seconds
        hop = busy = 0.0
        if stop < task.num_layers:
            turns = bool(setting.replicas)
            hop, busy = task.hop(stop, devices, setting.devices_of[index + 1], in_turns=turns)

        slowest = task.devices.slowest_speed(devices)

        def seconds(name: str, factor: float = pace.passes) -> float:
            own = task.layers.sum(name, start, stop)
            if task.groups is not None:
                layers = task.graph.layers[start:stop]
                own += task.groups.longer_collectives(name, layers, slowest)
            return factor * own

        prepares = seconds("split_forward_seconds") if setting.schedule.splits_backward else 0.0
        update = seconds("update_seconds", pace.updates)
        reduced = self._reduced(index, start, stop)
        waits = self._waits(index, start, stop)
        ahead, back = waits[:2] if self.way.gathers_each_use else (0.0, 0.0)
        # What runs again inside a backward finds its layer gathered.
        again = ahead if self.recomputes[index] == "stage" else 0.0
        return {
            "forward_seconds": seconds("forward_seconds") + prepares + more + ahead,
            "backward_input_seconds": seconds("backward_input_seconds") + more + back,
            "backward_weight_seconds": seconds("backward_weight_seconds"),
            "split_seconds": seconds("split_seconds") + more,
            "recompute_seconds": seconds("recompute_seconds") + more + again,
            "launch_seconds": more,
            "collective_seconds": seconds("collective_seconds"),
            "update_seconds": self.way.update_seconds(update, setting.ranks_of[index]),
            "reduce_seconds": reduced.seconds,
            "reduce_parts": reduced.num_parts,
            "reduce_steps": reduced.steps,
            "hop_seconds": hop,
            "link_seconds": busy,
        }

    def _waits(self, index: int, start: int, stop: int) -> tuple[float, float, float]:
        """How long a fully sharded stage waits for weights in a forward and in a backward, and for
        the sums of gradients behind the last one: while a layer computes, the weights of the next
        one come, and the sums of the one before are made. What travels in the memory that cores
        share takes the time of these, and hides nowhere."""
        task, setting = self.task, self.setting
        pace = task.pace(setting.devices_of[index], setting.devices, setting.mode).passes
        layers, ranks = task.graph.layers[start:stop], setting.ranks_of[index]
        if self.way.reducer != "fully-sharded" or len(ranks) < 2:
            return 0.0, 0.0, 0.0
        sizes = {size for own in layers for size in (own.parameter_bytes, own.summed_bytes)}
        gather = {size: self.way.gather_seconds(size, ranks) for size in sizes}
        spread = {size: self.way.shard_seconds(size, ranks) for size in sizes}
        weights = [gather[layer.parameter_bytes] for layer in layers]
        sums = [spread[layer.summed_bytes] for layer in layers]
        hides = 0.0 if self._share_memory(self.way.sharing(ranks)) else pace
        ahead = [hides * layer.forward_seconds for layer in layers]
        back = [hides * layer.backward_seconds for layer in layers]
        hides = 0.0 if self._share_memory(ranks) else pace
        behind = [hides * layer.backward_seconds for layer in layers]
        return (
            exposed_seconds(zip(weights, ahead, strict=True)),
            exposed_seconds(zip(weights[::-1], back[::-1], strict=True)),
            # A sum begins behind its layer's backward, and ends while the layers before compute.
            exposed_seconds(zip(sums, behind, strict=True)),
        )

    def _share_memory(self, ranks: Sequence[int]) -> bool:
        """Whether ranks are cores that share a memory."""
        devices = {self.setting.devices[rank] for rank in ranks}
        return any(devices <= {*host} for host, _ in self.task.topology.shared_memories)

    def _bytes(self, index: int, start: int, stop: int) -> dict[str, Any]:
        """The fields of a stage that say what it holds and hands on."""
        task, ranks = self.task, self.setting.ranks_of[index]
        optimizer_bytes = task.layers.sum("optimizer_bytes", start, stop)
        again = self.recomputes[index] == "layers"
        return {
            "transfer_bytes": task.layers.crossing_bytes[stop] if stop < task.num_layers else 0,
            **self._weight_bytes(index, start, stop),
            "optimizer_bytes": self.way.optimizer_bytes(optimizer_bytes, ranks),
            "buffer_bytes": int(task.layers.sum("buffer_bytes", start, stop)),
            "sum_bytes": self._sum_bytes(index, start, stop),
            "workspace_bytes": task.layers.workspace_bytes(start, stop, again=again),
            "activation_bytes": task.layers.activation_bytes(start, stop),
            "weight_kept_bytes": int(task.layers.sum("weight_kept_bytes", start, stop)),
            "input_bytes": task.layers.input_bytes[start],
            "layer_input_bytes": task.layers.again_input_bytes(start, stop),
        }

    def _weight_bytes(self, index: int, start: int, stop: int) -> dict[str, int | None]:
        """The fields of a stage that say what its weights and gradients take."""
        numbers, ranks = self.task.layers.numbers(start, stop), self.setting.ranks_of[index]
        weights, gradients = int(numbers["parameter_bytes"]), int(numbers["gradient_bytes"])
        held = None
        if self.way.reducer == "fully-sharded" and len(ranks) > 1:
            largest, shards = numbers["largest_bytes"], len(self.way.sharing(ranks))
            held = ceil(weights_held(self.task.gathered_for, weights, largest, shards))
        return {
            "parameter_bytes": weights,
            "weight_bytes": held,
            "gradient_bytes": None if gradients == weights else gradients,
        }

    def _reduced(self, index: int, start: int, stop: int) -> _Reduced:
        """How gradients of replicas, and of weights tied across stages, are summed."""
        task, setting = self.task, self.setting
        devices = setting.devices_of[index]
        gradients = task.layers.sum("gradient_bytes", start, stop)
        weights = task.layers.sum("parameter_bytes", start, stop)
        num_bytes = exchanged_bytes(self.way.reducer, gradients, weights)
        model = task.communication
        ranks = setting.ranks_of[index]
        exchange = self.way.exchange(num_bytes, ranks)
        backward = task.layers.sum("backward_input_seconds", start, stop) + task.layers.sum(
            "backward_weight_seconds", start, stop
        )
        pace = task.pace(devices, setting.devices, setting.mode).passes
        hidden = model.overlap * min(exchange.total, pace * backward)
        rate = task.graph.sum_bytes_per_second
        # Each replica adds what all others have of its own share.
        added = self.way.added_bytes(gradients, devices) / rate if rate else 0.0
        seconds = exchange.total - hidden + added + self._tied_seconds(index, start, stop)
        if self.way.reducer == "fully-sharded" and len(ranks) > 1:
            ahead, _, sums = self._waits(index, start, stop)
            if self.way.gathers_each_use:
                return _Reduced(added + sums)
            return _Reduced(added + ahead + self.way.shard_seconds(gradients, ranks))
        num_parts = self.way.num_parts(num_bytes, ranks, exchange)
        steps = tuple(step for step in (exchange.inside, added, exchange.back) if step)
        if num_parts > 1 or (self.way.passes_cards(ranks) and not model.overlap):
            return _Reduced(seconds, num_parts, (exchange.between, *steps))
        return _Reduced(seconds)

    def _tied_seconds(self, index: int, start: int, stop: int) -> float:
        task, devices = self.task, self.setting.devices_of
        total = 0.0
        for tie in task.layers.ties:
            if tie.is_parted(start, stop):
                holders = {bisect_right(self.cuts, layer) - 1 for layer in tie.holders}
                # Each sums an equal slice for all: it goes there, and comes back as a sum.
                share = ceil(tie.num_bytes / len(holders))
                for other in holders - {index}:
                    link = task.devices.link_between(devices[index], devices[other], share)
                    total += 2 * link.seconds(share)
        return total

    def _sum_bytes(self, index: int, start: int, stop: int) -> int:
        """Bytes of the parameters whose gradients a rank of the stage sums with others."""
        if len(self.setting.ranks_of[index]) > 1:
            numbers = self.task.layers.numbers(start, stop)
            sizes = numbers["gradient_bytes"], numbers["largest_gradient_bytes"]
            room: float = room_to_sum(self.way.reducer, *sizes)
            return ceil(room)
        return int(self.task.layers.numbers(start, stop)["tied_bytes"])
