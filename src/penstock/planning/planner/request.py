"""``PlanRequest``: all that ``plan`` can be asked, checked once; ``Constraints``: what follows for
the plans of one model.

The fields of a request are the keywords of ``penstock.plan``, of ``what_if`` and of the command
line alike. What is wrong whatever the model is refused when a request is made; what is wrong for a
model, when ``constraints`` and ``microbatch_sizes`` are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

from penstock.base.errors import InputError, PlanError
from penstock.base.units import count_of
from penstock.base.values import (
    MOST_AMOUNT,
    MOST_BYTES,
    expect,
    flag,
    is_number,
    is_whole,
    number,
    one_of,
    shown,
    whole,
)
from penstock.core.graph import LayerGraph
from penstock.core.schedule import families
from penstock.core.schedule.families.options import Replicas, read_replicas
from penstock.core.schedule.families.side_by_side import read_alike
from penstock.core.versions import USUAL, Policy
from penstock.planning.handover.capabilities import CutsBetween, capabilities_of
from penstock.planning.partition.chain import CostModel, cost_model
from penstock.planning.plans.consistency import MOST_MICROBATCHES
from penstock.planning.plans.summing import (
    BY_SHARE,
    MOST_STALE,
    REDUCERS,
    GatheredFor,
    ReducerName,
)

RecomputeRule = Literal["where-needed", "never", "stage", "layers"]
"""Whether stages may run forward twice: where they would not fit otherwise, never, or always."""

SpillRule = Literal["where-needed", "never", "always"]
"""Whether stages may come from a tier and leave again: where nothing fits otherwise, never, or
always."""

Objective = Literal["time", "devices", "cost"]
"""Goals of a plan: the shortest step, the fewest devices, or the least money."""

Options = tuple[tuple[str, Any], ...]
"""(name, value) pairs that a family is given."""

PLAIN = "1f1b"
"""The family whose order replicas and single stages take."""

PROPOSED = {
    "pipedream": "weight stashing learned as well as newest activations or better on every stream "
    "that was measured (docs/streams.md), and its versions and graphs fit",
    "partime": "one version and one graph per stage; weight stashing, which learned better on many "
    "streams (docs/streams.md), needs more memory or devices",
}
"""Schedules for a live source if none is asked for, the first that does it on the fewest devices,
and why."""

MOST_SIMULATED, MOST_WHOLE = 2_000_000, 100_000
"""The most ranks times microbatches, and microbatches, where every op may have to be simulated;
candidates with as many take seconds each."""

_WHOLE = families.HOLD_ALL | families.SEARCHED | {"pipedream-2bw"}
"""Families of which that is so: in all others, most microbatches do what those before them did."""

_SAID_ELSEWHERE = {
    "replicas": "give replicas=… (--replicas)",
    "minibatch": "it follows from the number of microbatches",
}


@dataclass(frozen=True)
class Constraints:
    """The conditions that a plan must meet, whatever the cluster.

    Attributes:
        schedule: the family; the best by default.
        stages: how many there are; the best number by default.
        versions: the weight-version policy; by default what belongs to the schedule.
        replicas: how many each stage has; none, and ``any_replicas`` decides.
        any_replicas: whether stages may be given replicas.
        asynchronous: whether the schedule may be one that never flushes, or must be.
        least_stages: the fewest stages.
        cuts: where stages begin, as ``Candidate.cuts``; none, and the best are found.
        recompute: what may run forward twice.
        spill: whether stages may come from a tier and leave again.
        options: (name, value) pairs that the schedule's family is given.
        engine: the other engine that is to run the plan; any plan with ``None``.
        expert_ranks: how many copies of a stage divide its experts.
    """

    schedule: str | None = None
    stages: int | None = None
    versions: Policy | None = None
    replicas: tuple[int, ...] = ()
    any_replicas: bool = True
    asynchronous: Literal["no", "also", "only"] = "no"
    least_stages: int = 1
    cuts: tuple[int, ...] = ()
    recompute: RecomputeRule = "where-needed"
    spill: SpillRule = "where-needed"
    options: Options = ()
    engine: str | None = None
    expert_ranks: int = 1

    def obstacle(
        self, family: str, replicas: tuple[int, ...], num_microbatches: int, num_ranks: int
    ) -> PlanError | None:
        """Why the engine that the plan is for cannot run such a schedule, or its copies cannot
        divide experts; ``None`` if they can."""
        if self.expert_ranks > 1 and (refusal := self._parted(replicas, num_microbatches)):
            return PlanError(f"{self.expert_ranks} expert ranks: {refusal}")
        if self.engine is None:
            return None
        able = capabilities_of(self.engine)
        if not able.runs(family):
            return PlanError(f"{able.title} does not run {family}; it has {able.has}")
        copies = max(replicas, default=1)
        if len({*replicas}) > 1 or num_microbatches % copies:
            return PlanError(
                f"{able.title} gives every stage as many replicas, and these as many microbatches"
            )
        limit = able.limits.get("a last round of microbatches")
        share, depth = num_microbatches // copies, num_ranks // copies
        if limit and family == "interleaved-1f1b" and share % depth:
            return PlanError(
                f"{share} microbatches are no multiple of {depth} ranks, but {able.title} "
                f"{limit.reason}"
            )
        return None

    def _parted(self, replicas: tuple[int, ...], num_microbatches: int) -> str:
        """Why copies of stages cannot divide experts, in words; empty if they can."""
        copies = max(replicas, default=1)
        if self.never_flushes:
            return "they go with schedules that flush"
        if len({*replicas}) > 1 or copies % self.expert_ranks:
            return f"every stage needs as many replicas, a multiple of {self.expert_ranks}"
        if num_microbatches % copies:
            return f"{copies} replicas do not have as many of {num_microbatches} microbatches each"
        return ""

    @property
    def may_spill(self) -> bool:
        """Whether nothing is asked for that decides about stages already."""
        pinned = (self.stages, *self.cuts, *self.replicas)
        flushes = self.versions is None or not self.versions.asynchronous
        alone = self.expert_ranks == 1
        return self.schedule in (None, "spilled") and pinned == (None,) and flushes and alone

    @property
    def never_flushes(self) -> bool:
        """Whether weights are old in whatever is asked for."""
        return self.asynchronous == "only" or _is_late(self.schedule, self.versions)

    def allows(self, num_stages: int) -> bool:
        """Whether a plan may have ``num_stages``."""
        return num_stages >= self.least_stages and self.stages in (None, num_stages)


def _is_late(family: str | None, versions: Policy | None) -> bool:
    """Whether what is named never flushes, so that weights are old."""
    return family in USUAL or bool(versions and versions.asynchronous)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request for a plan. Its fields are the keywords of ``penstock.plan``, where they are
    explained.

    Raises:
        PlanError: a plan cannot have this schedule.
        InputError: a value that its keyword cannot have, or two that contradict each other.
    """

    microbatches: int | None = None
    minibatch: int | None = None
    schedule: str | None = None
    stages: int | None = None
    cuts: Sequence[int | str] = ()
    memory_bytes: int | None = None
    versions: Policy | None = None
    replicas: Replicas | None = None
    asynchronous: bool = False
    recompute: RecomputeRule = "where-needed"
    cost_model: str = "ring"
    overlap: float = 0.0
    tensor_ranks: int | Literal["any"] = 1
    expert_ranks: int = 1
    context_ranks: int = 1
    reducer: ReducerName | Literal["any"] = "owners"
    stale: int = 0
    gathered_for: GatheredFor = "step"
    hybrid: bool = False
    layer_order: Literal["execution", "any"] = "execution"
    placer: Literal["exact", "reinforce"] = "exact"
    rate: float | None = None
    spill: SpillRule = "where-needed"
    engine: str | None = None
    objective: Objective = "time"
    within_seconds: float | None = None
    price_per_hour: float | None = None
    patience_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.engine is not None:
            self._check_engine(self.engine)
        expect(
            self.versions, Policy | None, "versions", "take one of penstock.versions, as in Stash()"
        )
        one_of("recompute", self.recompute, get_args(RecomputeRule))
        one_of("layer_order", self.layer_order, ("execution", "any"))
        one_of("placer", self.placer, ("exact", "reinforce"))
        one_of("spill", self.spill, get_args(SpillRule))
        flag("asynchronous", self.asynchronous)
        expect(self.cuts, list | tuple, "cuts", "give a list of layers, as in cuts=[3]")
        for name in ("microbatches", "minibatch", "stages", "memory_bytes"):
            if (count := getattr(self, name)) is not None:
                whole(name, count, 1, MOST_BYTES if "bytes" in name else families.LARGEST)
        family, _ = self._named
        if family is not None:
            _check_plannable(family)
        if self.rate is not None:
            self._check_rate(self.rate)
        cost_model(self.cost_model, self.overlap)
        self._check_summing()
        width = self.tensor_ranks
        if width != "any" and not (is_whole(width) and 1 <= int(width) <= families.LARGEST):
            raise InputError(f"tensor_ranks is {shown(width)}; give a whole number ≥ 1 or 'any'")
        self._check_experts()
        self._check_context()
        for name in ("patience_seconds", "within_seconds", "price_per_hour"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), positive=True)
        self._check_objective()
        never = self.versions is not None and self.versions.asynchronous
        if never and self.recompute in ("stage", "layers"):
            raise InputError("stages do not run forward twice where the pipeline never flushes")

    def _check_context(self) -> None:
        whole("context_ranks", self.context_ranks, 1, families.LARGEST)
        if self.context_ranks == 1:
            return
        asked = {
            "tensor_ranks": self.tensor_ranks != 1,
            "engine": self.engine is not None,
            "reducer='fully-sharded'": self.reducer == "fully-sharded",
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise InputError(
                    f"context_ranks={self.context_ranks} does not go with {name}: devices that "
                    "share a layer divide its sequence alone, and Penstock runs that; leave one out"
                )

    def _check_objective(self) -> None:
        one_of("objective", self.objective, get_args(Objective))
        if self.objective == "time":
            if self.within_seconds is not None:
                raise InputError(
                    "within_seconds says how long a step may take, and a plan for objective='time' "
                    "takes as little as it can; take objective='devices' or 'cost', or leave "
                    "within_seconds out"
                )
            return
        asked = {
            "rate": (self.rate is not None, "a plan for a rate has the fewest devices already"),
            "placer='reinforce'": (self.placer == "reinforce", "it places layers on all devices"),
            "spill='always'": (self.spill == "always", "stages then come and go on all devices"),
        }
        for words, (is_asked, why) in asked.items():
            if is_asked:
                raise InputError(
                    f"objective={self.objective!r} does not go with {words}: {why}; leave one out"
                )

    def _check_experts(self) -> None:
        whole("expert_ranks", self.expert_ranks, 1, families.LARGEST)
        asked = {
            "tensor_ranks": self.tensor_ranks != 1,
            f"reducer={self.reducer!r}": self.reducer not in ("owners", "sharded"),
            "asynchronous": self.asynchronous or self._never_flushes,
            "spill='always'": self.spill == "always",
            "placer='reinforce'": self.placer == "reinforce",
        }
        for words, is_asked in asked.items():
            if is_asked and self.expert_ranks > 1:
                raise InputError(
                    f"expert_ranks={self.expert_ranks} does not go with {words}: copies of stages "
                    "exchange tokens, all in the same order; leave one of them out"
                )

    @property
    def cuts_between(self) -> CutsBetween:
        """Which parts of a model may be cut."""
        return "layers" if self.engine is None else capabilities_of(self.engine).cuts_between

    def _check_engine(self, engine: str) -> None:
        able = capabilities_of(engine)
        width, lacks = self.tensor_ranks, able.limits
        asked = {
            "asynchronous=True": self.asynchronous,
            "a rate": self.rate is not None,
            "versions that never flush": self.versions is not None and self.versions.asynchronous,
            f"spill={self.spill!r}": self.spill == "always",
            f"stale={self.stale}": self.stale > 0,
            f"tensor_ranks={width!r}": width != 1 and "tensor groups" in lacks,
            f"expert_ranks={self.expert_ranks}": self.expert_ranks > 1
            and "divided experts" in lacks,
            f"recompute={self.recompute!r}": self.recompute == "stage"
            and "recompute by stage" in lacks,
            f"reducer={self.reducer!r}": self.reducer not in ("owners", "sharded", "all-reduce"),
        }
        for words, is_asked in asked.items():
            if is_asked:
                raise InputError(
                    f"{words} is nothing that {able.title} does; leave it out, or leave out "
                    f"engine={engine!r}"
                )

    def _check_rate(self, rate: float) -> None:
        if not is_number(rate) or not 0 < rate <= MOST_AMOUNT:
            raise InputError(f"rate is {shown(rate)}; give frames per second, a number > 0")
        if self.family not in USUAL or self.placer != "exact":
            drains = self.family if self.family not in USUAL else f"placer={self.placer!r}"
            raise InputError(
                f"rate is for a stream that never ends, but {drains} drains at each update; take "
                f"one of {', '.join(USUAL)}, or leave rate out"
            )

    def _check_summing(self) -> None:
        one_of("reducer", self.reducer, (*REDUCERS, "any"))
        whole("stale", self.stale, 0, MOST_STALE)
        one_of("gathered_for", self.gathered_for, get_args(GatheredFor))
        if self.gathered_for != "step" and self.reducer != "fully-sharded":
            raise InputError(
                f"gathered_for={self.gathered_for!r} is for reducer='fully-sharded', and the "
                f"reducer is {self.reducer!r}; name that one, or leave gathered_for out"
            )
        flag("hybrid", self.hybrid)
        if self.hybrid and self.reducer != "fully-sharded":
            raise InputError(
                "hybrid=True is for reducer='fully-sharded', whose weights are then sharded inside "
                f"hosts, and the reducer is {self.reducer!r}; name that one, or leave hybrid out"
            )
        if self.reducer == "fully-sharded" and self.tensor_ranks != 1:
            raise InputError(
                "reducer='fully-sharded' gathers whole layers, of which tensor ranks have parts; "
                "leave tensor_ranks out, or take reducer='sharded'"
            )
        drained = dict.fromkeys(BY_SHARE, "shares of the weights")
        drained["parameter-server"] = "copies' weights"
        if self.reducer in drained and (self.asynchronous or self._never_flushes):
            raise InputError(
                f"reducer={self.reducer!r} updates {drained[self.reducer]} when a pipeline has "
                "drained, and one that is asynchronous never does; take another reducer, or leave "
                "out "
                f"{'asynchronous' if self.asynchronous else self.family}"
            )
        if self.stale and self.reducer != "parameter-server":
            raise InputError(
                f"stale={self.stale} is for reducer='parameter-server', and the reducer is "
                f"{self.reducer!r}; name that one, or leave stale out"
            )

    @property
    def _never_flushes(self) -> bool:
        return _is_late(self.family, self.versions)

    @cached_property
    def _named(self) -> tuple[str | None, Options]:
        """The schedule family that is named, and its options, as in
        ``interleaved-1f1b:stages_per_rank=4``."""
        if self.schedule is None:
            return None, ()
        family, options = families.named(self.schedule)
        for option in options:
            if option in _SAID_ELSEWHERE:
                raise InputError(f"{family}: leave {option} out; {_SAID_ELSEWHERE[option]}")
        return family, tuple(options.items())

    @cached_property
    def family(self) -> str | None:
        """The schedule family, if it is named, or follows from the policy or the rate."""
        named, _ = self._named
        if named is not None:
            return named
        if self.versions is not None and (self.rate is not None or self.versions.asynchronous):
            return self.versions.family
        return None if self.rate is None else next(iter(PROPOSED))

    @property
    def proposes_stream(self) -> bool:
        """Whether there is a rate to keep, and nobody has said with which schedule."""
        return self.rate is not None and self.schedule is None and self.versions is None

    @cached_property
    def communication(self) -> CostModel:
        """How exchanges of gradients and messages are counted."""
        return cost_model(self.cost_model, self.overlap)

    def constraints(self, graph: LayerGraph) -> Constraints:
        """The conditions that plans of a model must meet.

        Raises:
            PlanError: the model has fewer layers than stages are asked for.
            InputError: the model has no such layers, or what is asked of stages contradicts itself.
        """
        num_layers, stages = len(graph.layers), self.stages
        if stages is not None and stages > num_layers:
            raise PlanError(
                f"{num_layers} layers cannot make {stages} stages, each needs at least one; ask "
                f"for at most {num_layers} stages"
            )
        cuts = _read_cuts(graph, self.cuts) if self.cuts else ()
        if cuts and stages not in (None, len(cuts) - 1):
            raise InputError(f"the cuts make {len(cuts) - 1} stages, but stages is {stages}")
        stages = len(cuts) - 1 if cuts else stages
        counts, stages = _read_counts(self.replicas, stages, self.family)
        pinned = self.family is not None or stages is not None
        _, options = self._named
        constraints = Constraints(
            self.family,
            stages,
            self.versions,
            replicas=counts,
            any_replicas=self.replicas == "any" or (self.replicas is None and not pinned),
            asynchronous="also" if self.asynchronous else "no",
            cuts=cuts,
            recompute=self.recompute,
            spill="never" if self.engine else self.spill,
            options=options,
            engine=self.engine,
            expert_ranks=self.expert_ranks,
        )
        if self.placer == "reinforce" and self.spill != "always":
            _check_learnable(constraints)
        return constraints

    def microbatch_sizes(
        self, graph: LayerGraph, num_ranks: int, *, shares_cards: bool = False
    ) -> list[tuple[int, int]]:
        """(rows, count) of the microbatches that a minibatch may be cut into, where these are not
        too many to be simulated.

        Args:
            num_ranks: in a straight pipeline through all devices.
            shares_cards: whether what travels between them may have to wait for other messages.
        """
        choices = self._all_sizes(graph)
        most, why = self._most_microbatches(num_ranks, shares_cards)
        simulated = [(size, count) for size, count in choices if count <= most]
        if not simulated:
            fewest = min(count for _, count in choices)
            raise InputError(
                f"{fewest:,} microbatches on {count_of(num_ranks, 'rank')} are too many to plan, "
                f"since {why}; ask for {most:,} microbatches, or for a smaller minibatch"
            )
        return simulated

    def _most_microbatches(self, num_ranks: int, shares_cards: bool) -> tuple[int, str]:
        """How many a minibatch may have, and why no more."""
        moves = self.spill == "always" or self.placer == "reinforce"
        if moves or shares_cards or self.family in _WHOLE:
            most = min(MOST_SIMULATED // num_ranks, MOST_WHOLE)
            whose = "on hosts with network cards" if shares_cards else "of such a schedule"
            return most, (
                f"every op {whose} may have to be simulated: microbatches may be "
                f"{MOST_WHOLE:,} at most, and ranks × microbatches {MOST_SIMULATED:,}"
            )
        return MOST_MICROBATCHES, "nobody trains with so many"

    def _all_sizes(self, graph: LayerGraph) -> list[tuple[int, int]]:
        microbatches, minibatch = self.microbatches, self.minibatch
        if minibatch is None:
            if microbatches is None and is_live(self.family, self.versions, self.rate):
                microbatches = 1
            if microbatches is None:
                raise InputError(
                    "say how large a minibatch is: give microbatches=… (-m), or minibatch=rows "
                    "(--minibatch)"
                )
            return [(graph.microbatch_size, microbatches)]
        if microbatches is not None:
            if minibatch % microbatches:
                raise InputError(
                    f"a minibatch of {minibatch} rows does not make {microbatches} equal "
                    "microbatches"
                )
            return [(minibatch // microbatches, microbatches)]
        choices = [(size, minibatch // size) for size in graph.sizes if minibatch % size == 0]
        if not choices:
            sizes = ", ".join(map(str, graph.sizes))
            raise InputError(
                f"no microbatch size that was profiled ({sizes} rows) divides "
                f"a minibatch of {minibatch} rows; profile another size or change the minibatch"
            )
        return choices


def is_live(schedule: str | None, versions: Policy | None, rate: float | None) -> bool:
    """Whether a frame is a minibatch unless something else is said."""
    usual = USUAL.get(schedule or "") if versions is None else versions
    return rate is not None or (usual is not None and usual.activations == "newest")


def _check_plannable(family: str) -> None:
    """Raise ``PlanError`` for a family that no plan can have, on however many devices."""
    copies = 1
    if family not in families.SEARCHED:
        with suppress(InputError):  # a family that refuses so few ranks says so when it is searched
            copies = families.build(family, num_ranks=2, num_microbatches=4).weight_copies
    if copies > 1:
        raise PlanError(
            f"{family} keeps {copies} copies of each stage; a plan gives every stage one rank, so "
            "ask for another schedule"
        )


def _read_counts(
    replicas: Replicas | None, stages: int | None, schedule: str | None
) -> tuple[tuple[int, ...], int | None]:
    """(replicas of each stage, or nothing where they are not given; the number of stages, if one is
    asked for).

    Raises:
        InputError: they are no counts, or some for a family whose stages have none, or for another
            number of stages.
    """
    may_have = schedule is None or families.has_replicas(schedule)
    if replicas in (None, "any") or not replicas:
        if replicas == "any" and not may_have:
            raise _no_replicas(schedule)
        return (), stages
    is_alike = schedule is not None and schedule not in families.UNLIKE_REPLICAS
    counts = read_alike(schedule or "", replicas) if is_alike else read_replicas(replicas)
    if stages not in (None, len(counts)):
        raise InputError(f"replicas are given for {len(counts)} stages, but stages is {stages}")
    if max(counts) > 1 and not may_have:
        raise _no_replicas(schedule)
    # One of each is what every schedule has.
    has_own = schedule is None or schedule in families.UNLIKE_REPLICAS or max(counts) > 1
    return (counts, stages) if has_own else ((), len(counts))


def _no_replicas(schedule: str | None) -> InputError:
    return InputError(
        f"{schedule} has no replicas; take {PLAIN} or another schedule, or leave replicas out"
    )


def _read_cuts(graph: LayerGraph, cuts: Sequence[int | str]) -> tuple[int, ...]:
    """Where stages begin, and the number of layers."""
    names = [layer.name for layer in graph.layers]
    bounds = [0]
    for cut in cuts:
        if cut not in names and not (is_whole(cut) and 0 < int(cut) < len(names)):
            raise InputError(
                f"cuts: no stage can begin with layer {shown(cut)}; name a layer behind the first, "
                f"or give its number, 1 to {len(names) - 1}"
            )
        bounds.append(names.index(cut) if isinstance(cut, str) else cut)
    bounds.append(len(names))
    if any(first >= second for first, second in pairwise(bounds)):
        raise InputError(f"cuts: {list(cuts)} are not in the order of the layers")
    return tuple(bounds)


def _check_learnable(constraints: Constraints) -> None:
    """Raise ``InputError`` if something is asked for that a learned placement decides itself."""
    pinned = {
        "schedule": constraints.schedule not in (None, PLAIN),
        "stages": constraints.stages is not None,
        "cuts": bool(constraints.cuts),
        "replicas": bool(constraints.replicas),
        "versions": constraints.versions is not None and constraints.versions.asynchronous,
    }
    asked = [name for name, is_asked in pinned.items() if is_asked]
    if asked:
        raise InputError(
            f"placer='reinforce' decides about stages itself, for {PLAIN}; leave out "
            f"{' and '.join(asked)}"
        )
