"""Every way to run a small model on a small cluster, priced as the planner prices: what it is held
to. Small cases by a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace as replaced
from functools import cache
from inspect import signature
from itertools import combinations, pairwise, permutations, product
from math import ceil, inf
from random import Random

from msgspec.structs import replace

from penstock import Cluster, Device, Layer, LayerGraph, Link, schedules
from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Group
from penstock.core.schedule import families
from penstock.core.versions import Flush
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.cuts import with_cuts
from penstock.planning.planner.memory_limits import MemoryLimits
from penstock.planning.planner.offers import Offer
from penstock.planning.planner.setting import Setting
from penstock.planning.planner.task import Task
from penstock.planning.plans.stage_plan import RecomputeWay
from tests.kit.helpers import runnable_families
from tests.kit.planning import all_cuts

PLAIN = "1f1b"


@cache
def offered_unasked() -> list[str]:
    """The families that the planner may choose where nobody asks for one."""
    return [
        name
        for name in runnable_families()
        if name not in {"chimera", "spilled"}
        and schedules.build(name, num_ranks=2, num_microbatches=4).num_slices == 1
    ]


def best_of_all(task: Task, below: float = inf) -> Candidate | None:
    """The fastest candidate that fits and takes less than ``below`` seconds; ``None`` if there is
    none."""
    best = None
    for candidate in _fitting(task, below):
        if candidate.least_seconds < below and candidate.seconds < below:
            best, below = candidate, candidate.seconds
    return best


def any_that_fits(task: Task) -> Candidate | None:
    """A candidate that fits; ``None`` if there is none."""
    return next(_fitting(task, inf), None)


def _fitting(task: Task, below: float) -> Iterator[Candidate]:
    """All candidates that fit but those of which a rank alone takes ``below`` seconds or more, and
    those that recompute more than another one."""
    for setting in every_setting(task):
        memory = MemoryLimits(task, setting)
        for cuts in all_cuts(task.num_layers, setting.num_stages):
            if _least(task, setting, cuts) < below and _has_room(task, setting, memory, cuts):
                yield from fitting_with(task, setting, memory, cuts)


def fitting_with(
    task: Task, setting: Setting, memory: MemoryLimits, cuts: tuple[int, ...]
) -> Iterator[Candidate]:
    """The candidates with these cuts that fit but those that recompute more than another one."""
    fitting: list[tuple[RecomputeWay, ...]] = []
    for recomputes in _ways(task, setting, memory, cuts):
        candidate = Candidate(task, setting, cuts, recomputes)
        if not any(_is_less(own, recomputes) for own in fitting) and candidate.fits:
            fitting.append(recomputes)
            yield candidate


def _is_less(first: Sequence[RecomputeWay], second: Sequence[RecomputeWay]) -> bool:
    """Whether the second recomputes all that the first does."""
    return all(own in ("none", other) for own, other in zip(first, second, strict=True))


def uniform_layouts(task: Task) -> Iterator[Candidate]:
    """As many equal pipelines with 1F1B as there are devices for, of each depth, each stage with as
    many layers as any other, or one more; on the devices as they are listed."""
    for depth in range(1, min(len(task.cluster.devices), task.num_layers) + 1):
        for width in range(1, len(task.cluster.devices) // depth + 1):
            counts = (width,) * depth if width > 1 else ()
            devices = tuple(range(width * depth))
            cuts = tuple(task.num_layers * stage // depth for stage in range(depth + 1))
            for setting in _setting(task, Offer(PLAIN, devices, Flush(), counts)):
                yield with_cuts(task, setting, cuts)


def every_setting(task: Task) -> Iterator[Setting]:
    """Each schedule with each number of replicas on each choice of devices, in each order that is
    another one: those of one speed, memory and host stand for each other."""
    for num_ranks in range(1, len(task.cluster.devices) + 1):
        built = list(_built(task, num_ranks))
        for devices in _orders(task, num_ranks):
            for setting in built:
                yield replaced(setting, devices=devices)


def _built(task: Task, num_ranks: int) -> Iterator[Setting]:
    for family in offered_unasked() if num_ranks > 1 else [PLAIN]:
        for options in _options(family):
            yield from _setting(task, Offer(family, tuple(range(num_ranks)), options=options))
    for num_stages in range(1, min(num_ranks - 1, task.num_layers) + 1):
        for inner in combinations(range(1, num_ranks), num_stages - 1):
            counts = tuple(b - a for a, b in pairwise((0, *inner, num_ranks)))
            yield from _setting(task, Offer(PLAIN, tuple(range(num_ranks)), Flush(), counts))
    for width in range(2, num_ranks // 2 + 1):
        if num_ranks % width == 0:
            yield from _side_by_side(task, num_ranks, width)


def _side_by_side(task: Task, num_ranks: int, width: int) -> Iterator[Setting]:
    """So many pipelines of several ranks."""
    for family in set(offered_unasked()) - {*families.UNLIKE_REPLICAS}:
        for options in _options(family):
            depth = num_ranks // width
            pipeline = Offer(family, tuple(range(depth)), options=options)
            for single in _setting(task, pipeline):
                counts = (width,) * single.num_stages
                offer = Offer(family, tuple(range(num_ranks)), Flush(), counts, options)
                yield from _setting(task, offer)


def _options(family: str) -> list[tuple[tuple[str, int], ...]]:
    if "stages_per_rank" not in signature(families.family(family)).parameters:
        return [()]
    return [(("stages_per_rank", count),) for count in (2, 3, 4)]


def _setting(task: Task, offer: Offer) -> Iterator[Setting]:
    try:
        yield offer.setting(task)
    except (InputError, PlanError):
        return


def _orders(task: Task, num_ranks: int) -> list[tuple[int, ...]]:
    host = {name: group.name for group in task.cluster.groups for name in group.members}
    kinds = [
        (device.speed, limit, host.get(device.name))
        for device, limit in zip(task.cluster.devices, task.devices.limits, strict=True)
    ]
    different = {
        tuple(kinds[device] for device in order): order
        for order in permutations(range(len(kinds)), num_ranks)
    }
    return list(different.values())


def _has_room(task: Task, setting: Setting, memory: MemoryLimits, cuts: tuple[int, ...]) -> bool:
    """Whether every rank has room for its stages while nothing is in flight."""
    states = [
        min(memory.state_bytes(stage, how, *bounds) for how in ("none", "layers"))
        for stage, bounds in enumerate(pairwise(cuts))
    ]
    return all(
        sum(states[stage] for stage in setting.stages_on(rank)) <= task.devices.limits[device]
        for rank, device in enumerate(setting.devices)
    )


def _ways(
    task: Task, setting: Setting, memory: MemoryLimits, cuts: tuple[int, ...]
) -> list[tuple[RecomputeWay, ...]]:
    """The ways to recompute, those that recompute least first. A stage that has a memory for itself
    recomputes if it must."""
    if min(task.devices.limits) == inf and not task.topology.shared_memories:
        return [("none",) * setting.num_stages]
    if setting.is_exact and not task.topology.shared_memories:
        return [tuple(memory.recompute(k, *bounds) for k, bounds in enumerate(pairwise(cuts)))]
    every = product(("none", "layers", "stage"), repeat=setting.num_stages)
    return sorted(every, key=lambda own: setting.num_stages - own.count("none"))


def _least(
    task: Task, setting: Setting, cuts: tuple[int, ...], recomputes: Sequence[RecomputeWay] = ()
) -> float:
    """Seconds of a minibatch at least: the first microbatch reaches a rank, which does its work."""
    reached, way = [0.0] * setting.num_stages, 0.0
    busy = [0.0] * setting.num_stages
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        pace = task.pace(setting.devices_of[stage], setting.devices, setting.mode).passes
        reached[stage] = way
        way += pace * task.layers.sum("forward_seconds", start, stop)
        if stop < task.num_layers:
            ends = setting.devices_of[stage], setting.devices_of[stage + 1]
            way += task.hop(stop, *ends, in_turns=bool(setting.replicas))[0]
        seconds = sum(task.layers.compute_seconds[start:stop])
        if recomputes and recomputes[stage] != "none":
            seconds += task.layers.sum("recompute_seconds", start, stop)
        busy[stage] = ceil(task.num_microbatches / setting.replicas_of(stage)) * pace * seconds
    return max(
        reached[stages[0]] + sum(busy[stage] for stage in stages)
        for stages in setting.schedule.stages_of
    )


def small_case(seed: int, most_layers: int = 5) -> tuple[LayerGraph, Cluster, int]:
    """(model, cluster, microbatches): few layers with skips, on devices of mixed speeds and
    memories, which may be on two hosts."""
    draw = Random(seed)
    graph = _graph(draw, most_layers)
    return _case(draw, graph, _devices(draw, graph, draw.randint(2, 4)))


def wide_case(seed: int) -> tuple[LayerGraph, Cluster, int]:
    """As ``small_case``, with up to nine layers on five or six devices: too many for all orders
    and cuts to be looked at."""
    draw = Random(seed)
    graph = _graph(draw, 9)
    return _case(draw, graph, _devices(draw, graph, draw.randint(5, 6)))


def case_of_one_host(seed: int) -> tuple[Task, list[Setting]]:
    """Devices that share what memory there is, and all schedules."""
    draw = Random(seed)
    graph = _graph(draw, 6)
    count = draw.choice([2, 2, 3])
    devices = tuple(Device(name=f"d{k}", speed=draw.choice([1.0, 1.0, 2.0])) for k in range(count))
    graph, cluster, microbatches = _case(draw, graph, devices)
    whole = sum(_state(layer) for layer in graph.layers)
    shared = replace(cluster, memory_bytes=int(whole * draw.uniform(1.0, 2.5)))
    task = Task(graph, shared, microbatches)
    return task, [own for own in _built(task, count) if own.num_stages <= task.num_layers]


def _case(
    draw: Random, graph: LayerGraph, devices: tuple[Device, ...]
) -> tuple[LayerGraph, Cluster, int]:
    fast, slow = (
        Link(
            latency_seconds=draw.choice([0.0, 1e-4, 2e-3]),
            bytes_per_second=draw.choice([0.0, rate, 4 * rate]),
        )
        for rate in (2e6, 1e5)
    )
    groups: tuple[Group, ...] = ()
    if len(devices) > 2 and draw.random() < 0.5:
        parts = devices[: len(devices) // 2], devices[len(devices) // 2 :]
        groups = tuple(
            Group(name=f"host{number}", members=tuple(d.name for d in part), link=fast)
            for number, part in enumerate(parts)
        )
    link = slow if groups else draw.choice([fast, slow])
    cluster = Cluster(devices=devices, link=link, groups=groups)
    if draw.random() < 0.1:
        whole = sum(_state(layer) for layer in graph.layers)
        cluster = replace(cluster, memory_bytes=int(whole * draw.uniform(1.2, 4)))
    return graph, cluster, draw.randint(1, 8)


def _graph(draw: Random, most_layers: int) -> LayerGraph:
    num_layers, even = draw.randint(2, most_layers), draw.random() < 0.4

    def seconds() -> float:
        return 0.01 if even else draw.uniform(0.001, 0.03)

    skips: dict[int, dict[str, int]] = {}
    if num_layers > 2 and draw.random() < 0.3:
        first, last = sorted(draw.sample(range(num_layers), 2))
        skips[first] = {f"layer{last}": draw.randint(0, 2000)} if last > first + 1 else {}
    layers = tuple(
        Layer(
            name=f"layer{index}",
            forward_seconds=seconds(),
            backward_input_seconds=seconds(),
            backward_weight_seconds=seconds(),
            update_seconds=draw.choice([0.0, 0.002]),
            activation_bytes=draw.randint(100, 3000),
            held_input_bytes=draw.randint(0, 500),
            weight_kept_bytes=draw.randint(0, 500),
            workspace_bytes=draw.choice([0, 500]),
            output_bytes=draw.randint(10, 1000),
            parameter_bytes=draw.randint(0, 3000),
            optimizer_bytes=draw.randint(0, 3000),
            skip_bytes=skips.get(index, {}),
        )
        for index in range(num_layers)
    )
    return LayerGraph(layers=layers, input_bytes=draw.randint(0, 500))


def _devices(draw: Random, graph: LayerGraph, num_devices: int) -> tuple[Device, ...]:
    mixed_speeds, limited = draw.random() < 0.5, draw.random() < 0.6
    mixed_memories = draw.random() < 0.5
    whole = sum(_state(layer) for layer in graph.layers)
    everywhere = int(whole * draw.uniform(0.4, 2) / num_devices**0.5)

    def memory() -> int:
        if not limited:
            return 0
        return int(everywhere * draw.choice([0.5, 1, 2])) if mixed_memories else everywhere

    return tuple(
        Device(
            name=f"d{index}",
            speed=draw.choice([0.5, 1.0, 2.0]) if mixed_speeds else 1.0,
            memory_bytes=memory(),
        )
        for index in range(num_devices)
    )


def _state(layer: Layer) -> int:
    return 2 * layer.parameter_bytes + layer.optimizer_bytes + layer.activation_bytes
