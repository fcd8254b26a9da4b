"""``Offer``: a schedule on some devices that may be worth building; all that constraints allow."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain, product
from math import ceil

from penstock.base.errors import InputError, PlanError
from penstock.base.units import count_of
from penstock.core.graph import Mode
from penstock.core.schedule import Schedule, families
from penstock.core.schedule.families.options import placed
from penstock.core.schedule.rounds import filling
from penstock.core.versions import USUAL, DoubleBuffer, Flush, Policy, Stash, check_policy
from penstock.planning.partition import best_partition
from penstock.planning.planner.orders import (
    ReplicaShape,
    all_shapes,
    are_few,
    are_some,
    orders,
    orders_for,
    pipeline_by_pipeline,
    swapped,
    unlike_first,
)
from penstock.planning.planner.request import (
    MOST_SIMULATED,
    PLAIN,
    Constraints,
    Options,
    RecomputeRule,
)
from penstock.planning.planner.setting import Setting
from penstock.planning.planner.task import Task
from penstock.planning.planner.terms import Terms
from penstock.planning.plans.lockstep import check_lockstep

_STAGES_PER_RANK = (2, 3, 4)
_IDLE = 0.03
"""A share of a step that is worth more stages per rank."""
_UNASKED_NEVER = frozenset({*families.SEARCHED, *USUAL, "chimera", "seq1f1b", "spilled"})
"""Searched orders take time; Chimera needs two copies of each stage; not every model is capable of
slices; what never flushes changes what is learned; what brings weights in and out again is planned
where they do not fit (``spilling``)."""


_ALL_NUMBERS = 16
_BUILT_SLOWLY = frozenset({"zb-v", "v-half", "v-min", "hanayo"})
_WHOLE_IN_TURN = frozenset({"1f1b", "eager-1f1b", "gpipe"})
"""Families whose ranks have one stage each, with whole backwards."""

_SPLIT_IN_TURN = frozenset({"zb-h1", "zb-h2"})
"""Families whose ranks have one stage each, with backwards in halves."""

_WHOLE = _WHOLE_IN_TURN | {"interleaved-1f1b", "breadth-first"}
"""Families whose backwards are whole."""
_OTHER_WAYS = frozenset({"seq1f1b", "chimera"})
"""Families in which a microbatch comes in slices, or at both ends."""

_QUICKLY_BUILT = 2_000
"""Ranks times microbatches beyond which some orders take seconds to build."""
_FEW_ENOUGH_TO_HOLD = 10_000
"""Microbatches beyond which no order is looked at, unasked, that holds all of them at once: no
memory does."""
_DAPPLE_LIMIT = 5_000
"""Layers times devices beyond which DAPPLE's search, or several of PipeDream's, take seconds."""


@dataclass(frozen=True)
class Offer(Terms):
    """A schedule on some devices, not built yet."""

    def least_seconds(self, task: Task) -> float:
        """Seconds that a minibatch takes at least: with the devices of each pipeline busy all the
        time; where it flushes, also with the pipeline's beginning and end."""
        # Whether the family splits backwards, only its schedule tells.
        modes: tuple[Mode, ...] = ("stream",) if self.versions.asynchronous else ("whole", "split")
        busy, least_pace = task.least_busy(self.devices, modes, self.num_pipelines)
        if self.versions.asynchronous or self.num_ranks == 1:
            return busy
        ends = max(self._least_with_ends(task), self._least_with_ways_in(task))
        return max(busy, least_pace * ends)

    @property
    def is_in_turn(self) -> bool:
        """Whether ranks are known to have one stage each."""
        return self.family in _WHOLE_IN_TURN | _SPLIT_IN_TURN

    def may_be_one_of(self, constraints: Constraints) -> bool:
        """Whether constraints may allow its number of stages, as far as that is known yet."""
        if not self.is_in_turn:
            return True
        return constraints.allows(len(self.replicas) or self.num_ranks)

    def _least_with_ends(self, task: Task) -> float:
        """Seconds of a minibatch on devices of the profile's speed, however the model is cut.

        A stage that a microbatch reaches after S seconds and that works on k of them for t seconds
        each is done after S + k t, or where its last gradient then goes back through backwards that
        are whole, after S + k t and all that S does not count. So of a step of c seconds it has at
        most t = (c - S) / k, and all stages together have c (1 - Π (1 - 1/k)).
        """
        whole = self.family in _WHOLE_IN_TURN
        if not whole and self.family not in _SPLIT_IN_TURN:
            return 0.0
        share = 1.0 if whole else task.layers.least_forward_share
        counts = self.replicas or (1,) * self.num_ranks
        left = 1.0
        for count in counts:
            left *= 1 - share / ceil(task.num_microbatches / count)
        least = share * sum(task.layers.compute_seconds) / (1 - left) if left < 1 else 0.0
        # Layers are not divided, so one stage may have more than its share.
        turns = ceil(task.num_microbatches / max(counts))
        return max(least, turns * task.least_slowest(len(counts)))

    def _least_with_ways_in(self, task: Task) -> float:
        """Seconds of a minibatch on devices of the profile's speed, however the model is cut, where
        ranks may have several stages.

        The first stages of p ranks are p different ones, so before that of the k-th of them there
        are k layers at least, through which the first microbatch must come; and where backwards are
        whole, the last gradient must go back. Besides, ranks do all the work.
        """
        if self.family in _OTHER_WAYS or len({*self.replicas}) > 1:
            return 0.0
        width = self.replicas[0] if self.replicas else 1
        depth = self.num_ranks // width
        names = ("forward_seconds", "backward_input_seconds")
        ways = names if self.family in _WHOLE else names[:1]
        outside = sum(task.layers.ways_in(name, depth) for name in ways)
        own = ceil(task.num_microbatches / width)
        return (own * sum(task.layers.compute_seconds) + outside) / depth

    def setting(self, task: Task) -> Setting:
        """Build the offer's schedule for a task.

        Raises:
            InputError: the family refuses, or the policy does not go with it.
            PlanError: it wants more stages than there are layers, copies of stages, or more
                replicas than a minibatch has microbatches.
        """
        widest = max(self.replicas, default=1)
        if not self.versions.asynchronous and widest > task.num_microbatches:
            raise PlanError(
                f"a stage has {widest} replicas, but a minibatch only {task.num_microbatches} "
                "microbatches; each replica needs at least one"
            )
        self._check_length(task)
        num_stages = len(self.replicas) or stages_of_pipeline(
            self.family, self.num_ranks, self.options
        )
        if num_stages > task.num_layers:
            raise PlanError(
                f"{self.family} on {self.num_ranks} rank(s) needs {num_stages} stages, but there "
                f"are only {task.num_layers} layers"
            )
        # Of a stream, as many as fill the pipeline.
        flushes = not self.versions.asynchronous
        counts = self.replicas or (1,) * self.num_ranks
        fills = 1 if flushes else filling(counts, self.versions.ahead)
        schedule = self._schedule(task, max(task.num_microbatches, fills))
        is_final = self.family not in families.SEARCHED
        terms = {field.name: getattr(self, field.name) for field in fields(Terms)}
        setting = Setting(**terms, schedule=schedule, is_final=is_final)
        counts = self.replicas or (1,) * setting.num_stages
        if task.reducer == "fully-sharded" and task.gathered_for == "use":
            check_lockstep(schedule)
        setting.copy_sums(task)
        check_policy(self.versions, self.family, counts, task.num_microbatches)
        return setting

    def _check_length(self, task: Task) -> None:
        """Raise ``PlanError`` if whole minibatches would be simulated that are too long for it."""
        size = self.num_ranks * task.num_microbatches
        by_minibatch = self.versions.asynchronous and self.versions.updates == "minibatch"
        if by_minibatch and size > MOST_SIMULATED:
            raise PlanError(
                f"{self.family} updates once per minibatch without a flush, which is simulated op "
                f"by op, and {task.num_microbatches:,} microbatches on "
                f"{count_of(self.num_ranks, 'rank')} are too many; ask for fewer, or for another "
                "schedule"
            )

    def _schedule(self, task: Task, num_microbatches: int) -> Schedule:
        # The same on all devices.
        terms, count = self.folded(num_microbatches)
        key = terms.family, terms.num_ranks, terms.replicas, count, terms.options
        schedule = task.schedules.get(key)
        if schedule is None:
            schedule = terms.shown(count)
            task.schedules.keep(key, schedule)
        return schedule


def offers(task: Task, constraints: Constraints) -> list[Offer]:
    """The offers that constraints allow for a task, but those that are ``guided``."""
    if constraints.replicas:
        allowed = list(_replicated(task, constraints))
    else:
        allowed = list(_straight(task, constraints))
        if _may_have_any(constraints):
            shapes = _shapes(task)
            allowed += _with_shapes(shapes, constraints, task.num_microbatches)
            allowed += _side_by_side(task, shapes, constraints)
    return list(dict.fromkeys(allowed))


def guided(task: Task, constraints: Constraints) -> list[Offer]:
    """The offers whose stages have the replicas that some planner would give them, which takes
    longer to find out."""
    if not _may_have_any(constraints) or are_few(task):
        return []
    if not task.cache.shapes:
        known = {*_shapes(task)}
        more = [*_partitions(task), *(all_shapes(task) if are_some(task) else ())]
        shapes = dict.fromkeys(shape for shape in more if shape not in known)
        task.cache.shapes.append(tuple(shapes))
    return list(_with_shapes(task.cache.shapes[0], constraints, task.num_microbatches))


def _may_have_any(constraints: Constraints) -> bool:
    family = constraints.schedule
    may_have = family is None or families.has_replicas(family)
    return constraints.any_replicas and may_have and not constraints.replicas


def _policy(constraints: Constraints, family: str) -> Policy:
    return constraints.versions or USUAL.get(family, Flush())


def _rule(constraints: Constraints, policy: Policy) -> RecomputeRule:
    return "never" if policy.asynchronous else constraints.recompute


def _policies(constraints: Constraints) -> tuple[tuple[str, Policy], ...]:
    """(family, policy) of what never flushes and is allowed where no schedule is asked for."""
    if constraints.versions is not None and constraints.versions.asynchronous:
        return ((constraints.versions.family, constraints.versions),)
    if constraints.asynchronous == "no":
        return ()
    return tuple((policy.family, policy) for policy in (Stash(), DoubleBuffer()))


def _names(
    constraints: Constraints, num_ranks: int, num_microbatches: int
) -> list[tuple[str, Policy]]:
    """The (family, policy) pairs that may run on so many ranks."""
    if constraints.schedule is not None:
        return [(constraints.schedule, _policy(constraints, constraints.schedule))]
    never_flushes = _policies(constraints) if num_ranks > 1 else ()
    if constraints.versions is not None and constraints.versions.asynchronous:
        return list(_policies(constraints))
    if constraints.asynchronous == "only":
        return list(never_flushes)
    # On one rank, all schedules do the same.
    names = families.names() if num_ranks > 1 else (PLAIN,)
    barred = _UNASKED_NEVER
    if num_microbatches > _FEW_ENOUGH_TO_HOLD:
        barred = barred | families.HOLD_ALL
    flushes = [(name, Flush()) for name in names if name not in barred]
    return [*flushes, *never_flushes]


def _straight(task: Task, constraints: Constraints) -> Iterator[Offer]:
    """One rank for every stage."""
    most = min(len(task.cluster.devices), task.num_layers)
    # Every rank has a stage at least.
    counts = range(1, min(most, constraints.stages or most) + 1)
    for num_ranks in _numbers(most) if constraints.stages is None else counts:
        large = num_ranks * task.num_microbatches > _QUICKLY_BUILT and constraints.schedule is None
        names = [
            pair
            for pair in _names(constraints, num_ranks, task.num_microbatches)
            if not (large and pair[0] in _BUILT_SLOWLY)
        ]
        for devices in orders(task, num_ranks):
            for family, policy in names:
                count = task.num_microbatches
                for options in _variants(
                    family, num_ranks, count, task.num_layers, constraints.options
                ):
                    yield Offer(family, devices, policy, (), options, _rule(constraints, policy))


def _numbers(most: int) -> list[int]:
    """How many ranks to try: all of a few; of many, fractions and powers of two."""
    if most <= _ALL_NUMBERS:
        return list(range(1, most + 1))
    fractions = {most // part for part in range(1, 9)}
    return sorted(fractions | {1 << power for power in range(most.bit_length())})


def _variants(
    family: str, num_ranks: int, num_microbatches: int, num_layers: int, given: Options
) -> Iterator[Options]:
    """The options worth trying beside those that are given: the family's own, and other numbers of
    stages per rank; of a family that searches, limits on what is in flight.

    Args:
        num_ranks, num_microbatches: of one pipeline.
    """
    usual: Iterable[Options] = _searches(family, num_ranks, num_layers)
    if family not in families.SEARCHED:
        usual = _stage_counts(family, num_ranks, num_microbatches, num_layers)
    for options in usual:
        yield tuple({**dict(options), **dict(given)}.items())


def _stage_counts(
    family: str, num_ranks: int, num_microbatches: int, num_layers: int
) -> Iterator[Options]:
    yield ()
    if "stages_per_rank" not in inspect.signature(families.family(family)).parameters:
        return
    counts, most = [*_STAGES_PER_RANK[1:]], num_layers // num_ranks
    # More, as long as beginning and end of a step would leave much of it.
    while num_ranks - 1 > _IDLE * counts[-1] * num_microbatches and counts[-1] < most:
        counts.append(2 * counts[-1])
    for count in counts:
        if num_ranks > 1 and count <= most:
            yield (("stages_per_rank", count),)


def _searches(family: str, num_ranks: int, num_layers: int) -> Iterator[Options]:
    """As much in flight as 1F1B, as fills all bubbles where costs are alike, half as much, and one
    microbatch; the searching family also on a V."""
    limits = dict.fromkeys((num_ranks, 2 * num_ranks - 1, ceil(num_ranks / 2), 1))
    for limit in limits:
        yield (("activation_limit", limit),)
        if family == "zb-auto" and 1 < num_ranks <= num_layers // 2 and limit <= num_ranks:
            yield (("activation_limit", limit), ("placement", "v"))


def _replicated(task: Task, constraints: Constraints) -> Iterator[Offer]:
    """The offers that have the given replicas.

    Raises:
        InputError: another number of stages is asked for.
        PlanError: too few devices or layers.
    """
    counts, num_devices = constraints.replicas, len(task.cluster.devices)
    if len(counts) > task.num_layers:
        raise PlanError(f"{task.num_layers} layers cannot make {len(counts)} stages")
    family = constraints.schedule or PLAIN
    policy = _policy(constraints, family)
    if family not in families.UNLIKE_REPLICAS:
        yield from _beside_one_another(task, constraints, family)
        return
    if sum(counts) > num_devices:
        raise PlanError(
            f"replicas {'-'.join(map(str, counts))} need {sum(counts)} devices, but there are "
            f"{num_devices}"
        )
    rule = _rule(constraints, policy)
    for devices in orders_for(task, counts):
        yield Offer(family, devices, policy, counts, (), rule)


def _with_shapes(
    shapes: Sequence[ReplicaShape], constraints: Constraints, most: int
) -> Iterator[Offer]:
    """Stages with replicas, for each family in which these may be unlike.

    Args:
        most: replicas where pipelines drain.
    """
    pairs: Sequence[tuple[str, Policy]]
    if constraints.schedule is not None:
        family = constraints.schedule
        asked = [(family, _policy(constraints, family))]
        pairs = asked if family in families.UNLIKE_REPLICAS else []
    else:
        never = constraints.asynchronous == "only" or (
            constraints.versions and constraints.versions.asynchronous
        )
        pairs = [*([] if never else [(PLAIN, Flush())]), *_policies(constraints)]
    for family, policy in pairs:
        for counts, devices in shapes:
            if max(counts) > most and not policy.asynchronous:
                continue  # a replica without a microbatch
            yield Offer(family, devices, policy, counts, (), _rule(constraints, policy))


def _side_by_side(
    task: Task, shapes: Sequence[ReplicaShape], constraints: Constraints
) -> Iterator[Offer]:
    """Equal pipelines of several ranks, for each family that drains and is none of
    ``_with_shapes``.

    Args:
        shapes: of which those are taken whose ranks have as many replicas.
    """
    names = [
        (family, policy)
        for family, policy in _names(constraints, 2, task.num_microbatches)
        if family not in families.UNLIKE_REPLICAS and families.has_replicas(family)
    ]
    for counts, devices in shapes:
        width, depth = counts[0], len(counts)
        if depth == 1 or len({*counts}) > 1 or width > task.num_microbatches:
            continue
        own = ceil(task.num_microbatches / width)
        large = depth * own > _QUICKLY_BUILT
        for family, policy in names:
            if large and family in _BUILT_SLOWLY and constraints.schedule is None:
                continue
            for options in _variants(family, depth, own, task.num_layers, constraints.options):
                num_stages = stages_of_pipeline(family, depth, options)
                if 0 < num_stages <= task.num_layers:
                    replicas, rule = (width,) * num_stages, _rule(constraints, policy)
                    yield Offer(family, devices, policy, replicas, options, rule)


def _beside_one_another(task: Task, constraints: Constraints, family: str) -> Iterator[Offer]:
    """The offers of pipelines side by side that have the given replicas.

    Raises:
        PlanError: no number of devices makes as many stages.
    """
    counts, num_devices = constraints.replicas, len(task.cluster.devices)
    width, policy = counts[0], _policy(constraints, family)
    fits, own = False, ceil(task.num_microbatches / width)
    for depth in range(1, num_devices // width + 1):
        exact = _with_stages(family, len(counts) / depth, constraints.options)
        usual = _variants(family, depth, own, task.num_layers, constraints.options)
        for options in dict.fromkeys([*usual, *exact]):
            if stages_of_pipeline(family, depth, options) == len(counts):
                fits = True
                for devices in orders_for(task, (width,) * depth):
                    rule = _rule(constraints, policy)
                    yield Offer(family, devices, policy, counts, options, rule)
    if not fits:
        raise PlanError(
            f"{family} makes no {count_of(len(counts), 'stage')} with {width} replicas each of "
            f"{count_of(num_devices, 'device')}; give other replicas or more devices"
        )


def _with_stages(family: str, stages_per_rank: float, given: Options) -> Iterator[Options]:
    """The options with which a family has so many stages on each rank, if it takes any number."""
    takes = "stages_per_rank" in inspect.signature(families.family(family)).parameters
    if takes and stages_per_rank > _STAGES_PER_RANK[-1] and stages_per_rank == int(stages_per_rank):
        yield tuple({"stages_per_rank": int(stages_per_rank), **dict(given)}.items())


@lru_cache(maxsize=1024)
def stages_of_pipeline(family: str, num_ranks: int, options: Options) -> int:
    """How many stages a family has on the ranks of one pipeline; 0 if it refuses."""
    with suppress(InputError):
        if family in families.SEARCHED:
            return len(placed(family, num_ranks, dict(options).get("placement", "straight")))
        # As many per rank on any number of them, and two are quickly built.
        few = min(num_ranks, 2)
        pipeline = families.build(family, num_ranks=few, num_microbatches=2 * few, **dict(options))
        return pipeline.num_stages * num_ranks // few
    return 0


def neighbours(task: Task, setting: Setting, moves: Iterable[tuple[int, int]]) -> Iterator[Offer]:
    """Offers that differ from a setting by one replica moved from a stage to another, where devices
    keep their order; or by two unlike devices that change places, one of which may have been
    idle.

    Args:
        moves: from which stages to which others a replica may go.
    """
    may_be_unlike = setting.replicas and setting.family in families.UNLIKE_REPLICAS
    for source, target in moves if may_be_unlike else ():
        counts = list(setting.replicas)
        counts[source] -= 1
        counts[target] += 1
        if counts[source]:
            yield _changed(setting, setting.devices, tuple(counts))
    for devices in dict.fromkeys(swapped(task, setting)):
        yield _changed(setting, devices, setting.replicas)


def _changed(setting: Setting, devices: tuple[int, ...], counts: tuple[int, ...]) -> Offer:
    terms = {field.name: getattr(setting, field.name) for field in fields(Offer)}
    return Offer(**{**terms, "devices": devices, "replicas": counts})


def _shapes(task: Task) -> list[ReplicaShape]:
    """All replicas of stages on a few devices; on more, those that often do well."""
    if are_few(task):
        return list(all_shapes(task))
    return [*_width_by_depth(task), *_all_but_some(task)]


def _all_but_some(task: Task) -> Iterator[ReplicaShape]:
    """Two stages, one of which has few devices: large layers at an end of the model want that."""
    everywhere = len(task.cluster.devices)
    for num_devices in dict.fromkeys((min(everywhere, task.num_microbatches + 1), everywhere)):
        for few in (1, 2) if num_devices > 2 and task.num_layers > 1 else ():
            for counts in {(num_devices - few, few), (few, num_devices - few)}:
                if min(counts) > 0:
                    yield counts, tuple(range(sum(counts)))


def _width_by_depth(task: Task) -> Iterator[ReplicaShape]:
    """As many pipelines side by side as there are devices for; of depth 1, data parallelism."""
    devices = task.cluster.devices
    # Replicas take turns, so slow devices may do better without any work.
    for least in sorted({device.speed for device in devices}):
        pool = [index for index, device in enumerate(devices) if device.speed >= least]
        for depth in _numbers(min(len(pool) // 2, task.num_layers)):
            most = len(pool) // depth
            for width in {min(most, task.num_microbatches), most} - {1}:
                # The replicas of a stage on different servers, a pipeline within one.
                across = pipeline_by_pipeline((width,) * depth)
                for order in unlike_first(task, pool):
                    yield (width,) * depth, tuple(order[: width * depth])
                    if not task.devices.is_flat:
                        yield (width,) * depth, tuple(order[number] for number in across)


def _partitions(task: Task) -> Iterator[ReplicaShape]:
    """PipeDream's, with an update per minibatch and with one per microbatch, whether exchanges of
    gradients hide behind compute or not, or of large tasks the first of these alone; and
    DAPPLE's."""
    models = (task.communication, replace(task.communication, overlap=1.0))
    ways = [*product((1 / task.num_microbatches, 1.0), models)]
    large = task.num_layers * len(task.cluster.devices) > _DAPPLE_LIMIT
    for updates, model in ways[:1] if large else ways:
        partition = best_partition(task.graph, task.cluster, model, updates=updates)
        yield from _shape([stage.devices for stage in partition.stages])
    if not large:
        from penstock.planning.partition.dapple import dapple_candidates

        for candidate in dapple_candidates(
            task.graph, task.cluster, task.num_microbatches, model=task.communication
        ):
            yield from _shape(candidate.devices)


def _shape(stages: Sequence[Sequence[int]]) -> Iterator[ReplicaShape]:
    """The shape of stages on these devices, if any has replicas."""
    counts = tuple(map(len, stages))
    if max(counts) > 1:
        yield counts, tuple(chain.from_iterable(stages))
