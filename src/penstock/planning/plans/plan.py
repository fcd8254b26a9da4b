"""``Plan``: how a model is spread, and what that is predicted to give. A file people edit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace as replaced
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, get_args

from msgspec.structs import asdict, replace

from penstock.base.arguments import public
from penstock.base.errors import InputError, printable
from penstock.base.lazily import method_loaded_when_used, provided
from penstock.base.values import FieldsByName, decoded, expect, one_of, read_as, whole
from penstock.core.cluster import Cluster, Device, SpareMachine
from penstock.core.graph import LayerGraph
from penstock.core.schedule import Schedule, families
from penstock.core.schedule.check import check
from penstock.core.schedule.lower import add_recompute, first_microbatches
from penstock.core.schedule.repetition import MANY, abridged
from penstock.core.schedule.rounds import filling
from penstock.core.timing.costs import Costs
from penstock.core.timing.timeline import Timeline
from penstock.core.versions import (
    USUAL,
    Policy,
    check_policy,
    weight_copies,
)
from penstock.planning.plans.consistency import (
    check_cards,
    check_devices,
    check_groups,
    check_levels,
    check_model,
    check_placement,
    check_recompute,
    check_replicas,
    check_summing,
    with_splits,
)
from penstock.planning.plans.draft import Draft, completed
from penstock.planning.plans.handed_over import HandOver
from penstock.planning.plans.lockstep import check_experts, check_lockstep, with_expert_ranks
from penstock.planning.plans.memory_parts import MemoryParts
from penstock.planning.plans.orders import (
    read_order,
    with_microbatches,
)
from penstock.planning.plans.prediction import Latency, Prediction
from penstock.planning.plans.spending import spending_of
from penstock.planning.plans.spilling import (
    Offload,
    check_offload_fits,
    check_spill,
    with_offload,
)
from penstock.planning.plans.stage_plan import RecomputeWay, Split
from penstock.planning.plans.summing import (
    GatheredFor,
    ReducerName,
    Summing,
    in_shards,
    served_by,
)
from penstock.planning.plans.table import WIDTH, argued, render, title

_UNPRICED = (
    "how copies sum their gradients was edited: predicted times are those of the sums before"
)

_LARGE = 10_000
"""Ops of a schedule that is not built whole without need."""
_ENOUGH_PER_RANK = 2
"""So many microbatches for each rank fill the pipeline of every family."""


class _Completing(FieldsByName):
    """``Plan(…)`` takes what a file may say, and completes it in the same way."""

    def __call__(cls, *values: object, **fields: Any) -> Any:
        return super().__call__(*values, **(fields if values else completed(Draft(**fields))))


# With ``dict``, what is worked out of a plan is kept beside its fields: no file, no comparison and
# no copy of a plan sees it.
class Plan(Draft, frozen=True, kw_only=True, dict=True, metaclass=_Completing):
    """How to spread one model. A plan is a value, complete and checked; what whoever makes one
    leaves out is worked out before (``Plan(…)``, ``from_json``, ``edited``).

    Attributes:
        model: fingerprint of the model it was made for (``LayerGraph.fingerprint``).
        schedule: name of a schedule family.
        options: the family's options.
        order: a line of ops per rank for a family that searches (``zb-auto``, ``optimal``), in the
            order that is best under the costs of the stages. Whoever makes a plan without it has it
            searched, in the memory of ``devices``. Empty for all other families.
        versions: which weights passes read (``penstock.versions``). A schedule that never flushes
            has a policy of its own, which stands for ``Flush()`` there.
        num_microbatches: per minibatch, at least 1.
        stages: in execution order, at least one.
        num_threads: intra-op threads of each worker, as in the profile.
        microbatch_size: rows of a microbatch, as in the profile; 0 where nobody says.
        devices: the device of each rank, in order; with several tensor ranks, the devices of a
            rank follow one another. Empty where nobody says.
        hosts, cards: the host of each rank, and the network card through which it reaches other
            hosts; ranks of equal numbers share one, and −1 is no card. What travels at once shares
            a card in the prediction. Empty where nobody says.
        summing: how ranks that hold the same weights sum their gradients.
        cost_model: the name of the one by which communication was counted.
        reason: one sentence on why this plan was chosen.
        alternatives: what else could have been done, and what it would have cost.
        contention: what ranks that share a machine were taken to cost each other.
        estimate: of what the profile was an estimate; ``None`` where it was measured.
        warnings: what makes the choice doubtful, in words.
        rate: frames per second of the live source that the plan is to keep up with; ``None`` where
            nobody says.
        spill: where the stages of a rank are while they are not in memory, if they come and go;
            ``None`` where all of them stay.
        offload: whose activations leave between forward and backward, and where to; ``None`` where
            all of them stay.
        example: with what the model was traced, if it names no spine; as in the profile.
        input_shapes: by layer, shapes and dtypes of what it was profiled with, for errors.
        file_version: the number of this file format; ``version`` in the file.

    Raises:
        InputError: the parts contradict each other: no stage, a stage without layers, a layer
            twice, or a placement that the schedule does not have.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule in families.SEARCHED and not self.order:
            raise InputError(
                f"order: {self.schedule} needs one, and none is there; Plan(…) and "
                "Plan.edited(order=()) search it"
            )
        if self.offload is not None:
            check_offload_fits(self.offload, self.stages, self.versions)
        check_placement(self._sample, self.stages, has_replicas=bool(self.given_replicas))
        if not self.versions.asynchronous:  # without a flush, a minibatch may end between replicas
            check_replicas(self.replicas, self.num_microbatches)
        check_groups(self._sample.stages_of, self.stages)
        check_devices(self.devices, self.num_seats)
        check_cards(self.cards, self.hosts, self.num_ranks)
        check_summing(self.summing, self.versions, self.num_ranks, self.stages)
        check_levels(self.summing.levels, self.hosts)
        check_policy(self.versions, self.schedule, self.replicas, self.num_microbatches)
        check_recompute(self.stages, self.schedule, self.versions)
        if self.spill is not None:
            check_spill(self.placement, self.versions, self.stages, self.summing.reducer)
        if self.summing.reducer == "fully-sharded":
            for stage in range(len(self.stages)):
                self.summing.shard_groups(self.placement.ranks_of(stage))
            if self.summing.gathered_for == "use":
                check_lockstep(self.placement)
            if self.offload is not None:
                raise InputError(
                    "offload moves what autograd has saved, also weights that the reducer "
                    "'fully-sharded' frees between uses; leave offload out, or take 'sharded'"
                )
        if self.divides_experts:
            check_experts(self.placement, self.stages, self.summing, self.versions, self.spill)
        self._check_versions()

    def _check_versions(self) -> None:
        if self.schedule in USUAL and not self.versions.asynchronous:
            raise InputError(
                f"versions: {self.schedule} never flushes; give it a policy of its own"
            )
        for index, stage in enumerate(self.stages):
            copies = weight_copies(self.versions, self.place(index))
            if stage.weight_versions != copies:
                raise InputError(
                    f"stage {index}: weight_versions is {stage.weight_versions}, but there are "
                    f"{copies} with versions: {self.versions.name}; change plans with Plan.edited, "
                    "which counts them"
                )

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "text") -> Plan:
        """Read a plan back from JSON. What a file that people write leaves out is completed: an
        order may be searched, as ``order`` says; a file that ``save`` wrote has it all.

        Args:
            text: what ``to_json`` wrote, perhaps edited by hand.
            where: the name to use in errors, for example the path of the file.

        Raises:
            FileError: not JSON, an unknown or missing key, or a wrong type; the path inside the
                file is named. Or the parts contradict each other.
        """
        expect(text, str | bytes, "the text", f"give what {cls.__name__}.to_json wrote")
        with read_as(cls.__name__, text, where):
            return cls(**asdict(decoded(text, Draft)))

    @classmethod
    @public({"num_stages": 'it is a field of the config, as in {**config, "num_stages": 4}'})
    def of(
        cls, engine: str, config: object, graph: LayerGraph, cluster: Cluster | None = None
    ) -> Plan:
        """The plan that a config of another engine describes, with the times and bytes that are
        predicted for it (``docs/other-engines.md``). What plans have no word for is left out, and
        ``warnings`` say it; so do ranks that need more memory than they have.

        Args:
            engine: ``"torchtitan"``, ``"megatron"``, ``"automodel"`` or ``"deepspeed"``.
            config: the text of its file, or of the command with its arguments, which is not run; a
                dictionary of its fields; or its own object. With DeepSpeed's also the arguments of
                ``PipelineModule``: ``{**config, "num_stages": 4}``.
            graph: the model's profile, or its estimate.
            cluster: all devices of the job, from which data parallelism follows where the config
                does not say it; by default as many cores as one copy of the pipeline needs.

        Raises:
            InputError: the config sets nothing, contradicts itself, or is for another model.
            PlanError: the cluster has fewer devices.
        """
        adopted: Plan = provided("adopted")(engine, config, graph, cluster)
        return adopted

    def edited(self, **changes: Any) -> Plan:
        """This plan with other values of some fields. What follows from them is worked out anew, as
        for a file that is edited: how many versions of its weights a stage has, and the order if it
        is taken out. Predicted times of stages stay; of other sums, ``warnings`` say it. Where
        levels say anew which copies of a fully sharded stage have its weights together, so do the
        bytes that its ranks keep.

        Raises:
            InputError: no such field, or the parts then contradict each other.
        """
        unknown = sorted(set(changes) - set(self.__struct_fields__))
        if unknown:
            raise InputError(f"a plan has no field {unknown[0]}")
        if "summing" in changes and "warnings" not in changes:
            changes["warnings"] = (*self.warnings, *self._unpriced(changes["summing"]))
        made = Plan(**{**asdict(self), **changes})
        return made if "stages" in changes else made._in_other_shards(self.summing)

    def _in_other_shards(self, before: Summing) -> Plan:
        """This plan, with stages whose bytes are those of other shards, if weights are fully
        sharded, and were before."""
        if not before.reducer == self.summing.reducer == "fully-sharded":
            return self
        if before.levels == self.summing.levels:
            return self
        ranks = map(self.placement.ranks_of, range(len(self.stages)))
        stages = (
            in_shards(stage, before.num_shards(own), self.summing.num_shards(own))
            for stage, own in zip(self.stages, ranks, strict=True)
        )
        return replace(self, stages=tuple(stages))

    def _unpriced(self, summing: Summing) -> tuple[str, ...]:
        """A warning of times that are those of other sums, if they are."""
        if max(map(len, map(self.placement.ranks_of, range(len(self.stages))))) == 1:
            return ()
        if _UNPRICED in self.warnings or summing == self.summing:
            return ()
        return (_UNPRICED,)

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """How many devices each rank has, which share every layer of its stages."""
        if self.num_tensor_ranks == 1:
            return (1,) * self.num_ranks
        return tuple(
            self.stages[own[0]].tensor_ranks if own else 1 for own in self._sample.stages_of
        )

    @property
    def num_seats(self) -> int:
        """How many devices the plan takes: one for each tensor rank of each rank."""
        return sum(self.group_sizes)

    @property
    def leaders(self) -> tuple[Device, ...]:
        """The first device of every rank; none where nobody says."""
        firsts = accumulate(self.group_sizes[:-1], initial=0)
        return tuple(self.devices[first] for first in firsts) if self.devices else ()

    @property
    def divides_experts(self) -> bool:
        """Whether copies of a stage divide the experts of its mixtures."""
        return any(stage.expert_ranks > 1 for stage in self.stages)

    @cached_property
    def placement(self) -> Schedule:
        """A schedule of this plan in which every rank has something to do, checked: of one
        minibatch where the pipeline drains, of a stream as long as fills it where it never does.
        Of thousands of microbatches it has only so many as show what ranks do and hold, where they
        do the same again and again for the others; ``build_schedule`` makes it whole."""
        whole, short = self._placed_microbatches, None
        if self._has_middle and whole >= MANY:
            short = abridged(self._build, whole, 2 * self.num_ranks)
        return self._build(whole) if short is None else short

    @property
    def _has_middle(self) -> bool:
        """Whether ranks do the same again and again for most of many microbatches."""
        varies = self.order or self.spill is not None or self.offload is not None
        return not varies and self.schedule not in families.HOLD_ALL

    @property
    def _sample(self) -> Schedule:
        """As ``placement``, but of no more microbatches than tell which rank has which stage: a
        plan is read at once, however many microbatches its minibatches have."""
        few = _ENOUGH_PER_RANK * self.num_ranks
        whole = self._placed_microbatches
        # What is small is built once and kept; it will be asked for again.
        if self.order or whole <= few or whole * self.num_ranks < _LARGE:
            return self.placement
        if not self._has_middle:
            families.check_size(self.schedule, self.num_ranks, whole, self.options)
        return self._build(few)

    @property
    def _placed_microbatches(self) -> int:
        fills = filling(self.replicas, self.versions.ahead) if self.versions.asynchronous else 1
        return max(self.num_microbatches, fills, *self.replicas)

    @cached_property
    def prediction(self) -> Prediction:
        """The predicted times, bytes and timelines; each part is worked out once."""
        return Prediction(
            self.stages,
            self.num_microbatches,
            self.versions,
            self.replicas,
            self.placement,
            self.build_schedule,
            self.spill,
            self.offload,
            served_by(self),
            self.cards,
            self.hosts,
            tuple(device.allocator_slack for device in self.leaders),
        )

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Predicted bytes of memory of each rank."""
        return self.prediction.rank_bytes

    @property
    def memory_parts(self) -> tuple[MemoryParts, ...]:
        """What the memory of each rank is spent on; the parts add up to ``rank_bytes``."""
        return self.prediction.memory_parts

    @property
    def updates_per_minibatch(self) -> tuple[float, ...]:
        """How often each stage updates its weights in a minibatch."""
        return self.prediction.updates_per_minibatch

    @property
    def one_device_seconds(self) -> float:
        """Seconds of a step without a pipeline, as the planner predicted them; where it did not, of
        every op of every stage and microbatch, one after another."""
        for alternative in self.alternatives:
            if alternative.label == "single device":
                return alternative.step_seconds
        return self.work_seconds

    @property
    def work_seconds(self) -> float:
        """Seconds that all ranks together work for a minibatch, updates included."""
        return self.prediction.work_seconds

    @property
    def step_seconds(self) -> float:
        """The predicted time of a minibatch, weight update included; without a flush, in the steady
        state."""
        return self.prediction.step_seconds

    @property
    def costs(self) -> Costs:
        """The predicted costs, stage by stage."""
        return self.prediction.costs

    @property
    def frames_per_second(self) -> float:
        """Microbatches that go through per second, as predicted."""
        return self.prediction.frames_per_second

    @property
    def latency(self) -> Latency:
        """Seconds from a frame's entry to its output, at light load and saturated, as predicted."""
        return self.prediction.latency

    def build_schedule(self, num_microbatches: int | None = None) -> Schedule:
        """The checked schedule, for this or another number of microbatches."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        return self.placement if count == self.placement.num_microbatches else self._build(count)

    def _build(self, count: int) -> Schedule:
        schedule = self._compute_only(count)
        again = [index for index, stage in enumerate(self.stages) if stage.recompute == "stage"]
        if again:
            schedule = add_recompute(schedule, again)
        if self.offload is not None:
            schedule = with_offload(schedule, self.offload)
        check(schedule)
        return schedule

    def _compute_only(self, count: int) -> Schedule:
        if self.order:
            searched = read_order(
                self.order, self.schedule, self.num_ranks, self.num_microbatches, self.replicas
            )
            return with_microbatches(searched, count)
        build = partial(families.build, self.schedule, num_ranks=self.num_ranks, **self.options)
        try:
            return build(num_microbatches=count)
        except InputError:
            if count >= self.num_microbatches or self.versions.asynchronous:
                raise
            # The family wants more; what is left of a longer schedule is one, too.
            return first_microbatches(build(num_microbatches=self.num_microbatches), count)

    def recomputing(self, how: RecomputeWay, stages: Collection[int] | None = None) -> Plan:
        """This plan with some stages keeping less and running forward twice.

        Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

        Args:
            how: ``"stage"`` keeps only the stage's input, ``"layers"`` the input of every layer,
                ``"none"`` everything.
            stages: their numbers; all by default.

        Raises:
            InputError: no such way, or no such stage.
        """
        one_of("how", how, get_args(RecomputeWay))
        expect(stages, Collection | None, "stages", "give a list of their numbers")
        chosen = range(len(self.stages)) if stages is None else stages
        absent = sorted(set(chosen) - set(range(len(self.stages))))
        if absent:
            raise InputError(f"there is no stage {absent[0]}: the plan has {len(self.stages)}")
        changed = (
            replace(stage, recompute=how) if index in chosen else stage
            for index, stage in enumerate(self.stages)
        )
        return replace(self, stages=tuple(changed))

    def offloading(self, offload: Offload | None) -> Plan:
        """This plan with activations that leave memory between forward and backward, or with all of
        them staying. Stages whose activations leave run forward once.

        Wan et al., "PipeOffload", arXiv 2503.01328.

        Raises:
            InputError: the plan never flushes, has no such stage, or shares layers between devices.
        """
        expect(
            offload, Offload | None, "offload", "give a penstock.planning.plans.spilling.Offload"
        )
        stages = self.stages
        if offload is not None:
            chosen = offload.chosen(len(stages))
            stages = tuple(
                replace(stage, recompute="none") if index in chosen else stage
                for index, stage in enumerate(stages)
            )
        return replace(self, stages=stages, offload=offload)

    def with_tensor_split(self, tensor_ranks: int, splits: Mapping[str, Split]) -> Plan:
        """This plan with several tensor ranks for every stage, of a model that was profiled on one
        device; predictions stay those of one.

        Args:
            tensor_ranks: devices that share every layer, at least 1.
            splits: how they do, by names of layers, or by patterns of modules inside them (see
                ``StagePlan``); what is not named is repeated on all of them.

        Raises:
            InputError: no such count or split, or a name that means no layer.
        """
        whole("tensor_ranks", tensor_ranks, 1)
        stages = with_splits(self.stages, tensor_ranks, splits)
        return replace(self, stages=stages, devices=())

    def with_context_ranks(self, context_ranks: int) -> Plan:
        """This plan with devices that share the positions of every sequence, for each rank
        (``docs/context-parallelism.md``); predictions stay those of one device.

        Args:
            context_ranks: how many share them, at least 1.

        Raises:
            InputError: no such count.
        """
        whole("context_ranks", context_ranks, 1)
        names = (
            (name for stage in self.stages for name in stage.layers) if context_ranks > 1 else ()
        )
        return self.with_tensor_split(context_ranks, dict.fromkeys(names, "context"))

    def with_versions(self, versions: Policy) -> Plan:
        """This plan with another weight-version policy of its kind of schedule.

        Raises:
            InputError: the policy does not go with the schedule.
        """
        expect(versions, Policy, "versions", "take one of penstock.versions, as in Stash()")
        return self.edited(versions=versions)

    def with_reducer(
        self,
        reducer: ReducerName,
        servers: Sequence[SpareMachine] = (),
        *,
        stale: int = 0,
        gathered_for: GatheredFor = "step",
    ) -> Plan:
        """This plan with another way to sum gradients of weights with several holders; times are
        those of the plan as it was.

        Args:
            reducer: see ``Summing``.
            servers: where ``penstock serve`` runs, for ``"servers"``; on which machines the last
                ranks run, for ``"parameter-server"``, by default one.
            stale: by how many updates a gradient may be late, for ``"parameter-server"``; then
                nothing is summed inside hosts first.
            gathered_for: how long weights stay gathered, for ``"fully-sharded"``.

        Raises:
            InputError: no such reducer, or it does not go with the schedule or with servers.
        """
        expect(servers, Sequence, "servers", "give a list of penstock.core.cluster.SpareMachine")
        has_levels = not stale and reducer != "fully-sharded"
        summing = replace(
            self.summing,
            reducer=reducer,
            servers=tuple(servers),
            stale=stale,
            levels=self.summing.levels if has_levels else (),
            gathered_for=gathered_for,
        )
        return replace(self, summing=summing)._in_other_shards(self.summing)

    def with_expert_ranks(self, expert_ranks: int, stages: Collection[int] = ()) -> Plan:
        """This plan with the experts of mixtures divided among copies of their stages; times are
        those of the plan as it was (``plan(…, expert_ranks=…)`` prices them).

        Args:
            expert_ranks: among how many copies; 1: each has all.
            stages: which stages, by number; by default all that have copies, and experts where the
                plan was made from a profile with some.

        Raises:
            InputError: a stage has no multiple of so many copies, or none has several, or the plan
                does not go with that (``docs/expert-parallelism.md``).
        """
        return replace(
            self, stages=with_expert_ranks(self.placement, self.stages, expert_ranks, stages)
        )

    def to(self, engine: str) -> HandOver:
        """This plan as another engine takes it: stages, degrees, microbatches, schedule and
        recomputation, in its words (``docs/other-engines.md``). ``str`` is what its users paste,
        ``save`` writes all files, and ``notes`` says what the engine does otherwise, and its cost.

        Args:
            engine: ``"torchtitan"``, ``"megatron"``, ``"automodel"``, ``"deepspeed"`` or
                ``"torch"``.

        Raises:
            PlanError: the engine would train something else by the plan, or not at all; what stands
                in the way is named, and the nearest plan without it.
            InputError: no such engine, or the plan's layers are none that the engine knows.
        """
        expect(engine, str, "the engine", "name it, as in plan.to('torchtitan')")
        handed: HandOver = provided("hand_over")(self, engine)
        return handed

    def simulate(self, num_minibatches: int | None = None) -> Timeline:
        """The predicted timeline of one step, weight update included. Of a schedule that never
        flushes, a stream of minibatches from its beginning to its end, with the versions that
        passes read.

        Args:
            num_minibatches: of the stream; by default enough to show the steady state.

        Raises:
            InputError: ``num_minibatches`` is no whole number ≥ 1, or more than memory holds.
        """
        if num_minibatches is not None:
            whole("num_minibatches", num_minibatches, 1)
        if num_minibatches is None or self.prediction.flushes:
            return self.marked(self.prediction.timeline)
        return self.marked(self.prediction.stream(num_minibatches))

    def marked(self, timeline: Timeline) -> Timeline:
        """A predicted timeline, whose name says so if it rests on an estimate."""
        if self.estimate is None:
            return timeline
        return replaced(timeline, name=f"{timeline.name} ({self.estimate.mark})")

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = WIDTH, *, details: bool = True) -> str:
        """The plan for people: its stages, what it is predicted to give, and why it was chosen.

        Args:
            width: of the longest line, in columns.
            details: whether to say what the memory of each stage is spent on, and what was measured
                of ranks that share a machine.
        """
        spending = spending_of(self)
        sheet = render(
            title(self),
            self.prediction,
            self.one_device_seconds,
            self.rate,
            spending=str(spending) if spending.in_money else "",
            width=width,
            details=details,
            shards_optimizer=self.summing.reducer == "sharded",
        )
        contention = self.contention if details else None
        why = (self.alternatives, self.reason, contention, self.warnings)
        return printable(argued(sheet, *why, width))

    _repr_html_ = method_loaded_when_used("penstock.planning.plans.picture", "plan_cell")
    _drawn_ = method_loaded_when_used("penstock.planning.plans.picture", "drawn")

    @cached_property
    def on_accelerator(self) -> tuple[bool, ...]:
        """For each rank, or each tensor rank of each, whether it was planned for an accelerator;
        not where nobody says."""
        if not self.devices:
            return (False,) * self.num_seats
        return tuple(device.kind == "gpu" for device in self.devices)

    def check_model(self, names: Sequence[str], model_fingerprint: str) -> None:
        """Raise ``ModelError`` unless this plan was made for a model with these layers."""
        check_model(self.layers, self.model, names, model_fingerprint)
