"""``Plan``: how a model is spread, and what that is predicted to give. A file people edit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from math import ceil, inf
from typing import Any, get_args

from msgspec import field
from msgspec.structs import force_setattr, replace

from penstock.cluster import Device
from penstock.errors import InputError, ModelError
from penstock.graph import Contention
from penstock.plans.alternative import Alternative, argued
from penstock.plans.consistency import check_devices, check_kinds, check_layers
from penstock.plans.orders import (
    check_order_options,
    read_order,
    search_order,
    with_microbatches,
    written,
)
from penstock.plans.stage_plan import Recompute, StagePlan, bytes_of_ranks, costs_of, sizes_of
from penstock.plans.steady import steady_seconds, stream_of
from penstock.plans.table import count_of, render
from penstock.schedule import Schedule, families
from penstock.schedule.check import check
from penstock.schedule.families.replicated import read_replicas
from penstock.schedule.lower import add_recompute, add_update, first_microbatches
from penstock.schedule.memory import Sizes
from penstock.schedule.rounds import filling
from penstock.timing.costs import Costs
from penstock.timing.simulator import simulate
from penstock.timing.timeline import Timeline
from penstock.values import MOST_BYTES, Value, expect, one_of, whole
from penstock.versions import (
    USUAL,
    Flush,
    Place,
    Policy,
    check_policy,
    place_of,
    versions_read,
    weight_copies,
)


class Plan(Value, frozen=True, kw_only=True):
    """How to spread one model.

    Attributes:
        model: fingerprint of the model it was made for (``LayerGraph.fingerprint``).
        schedule: name of a schedule family.
        options: the family's options.
        order: of a family that searches (``zb-auto``, ``optimal``), the order that it found under
            the costs of the stages, a line of ops per rank. Where it is left out, it is searched
            now, in the memory of ``devices``. Empty for all other families.
        versions: which weights passes read (``penstock.versions``). A schedule that never flushes
            has a policy of its own, which stands for ``Flush()`` there.
        num_microbatches: per minibatch, at least 1.
        stages: in execution order, at least one.
        num_threads: intra-op threads of each worker, as in the profile.
        microbatch_size: rows of a microbatch, as in the profile; 0 where nobody says.
        devices: of each rank, in order; with several tensor ranks, those of a rank follow one
            another. Empty where nobody says.
        num_tensor_ranks: devices that share every layer of a stage (``StagePlan.splits``).
        cost_model: by which communication was counted.
        reason: one sentence on why this plan was chosen.
        alternatives: what else could have been done, and what it would have cost.
        contention: what ranks that share a machine were taken to cost each other.
        warnings: what makes the choice doubtful, in words.
        version: of this file format.

    Raises:
        InputError: the parts contradict each other: no stage, a stage without layers, a layer
            twice, or a placement that the schedule does not have.
    """

    model: str
    schedule: str
    num_microbatches: int
    stages: tuple[StagePlan, ...]
    options: dict[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    versions: Policy = field(default_factory=Flush)
    num_threads: int = 1
    microbatch_size: int = 0
    devices: tuple[Device, ...] = ()
    num_tensor_ranks: int = 1
    cost_model: str = "ring"
    reason: str = ""
    alternatives: tuple[Alternative, ...] = ()
    contention: Contention = Contention()
    warnings: tuple[str, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        self.check_fields()
        if self.version != 1:
            raise InputError(
                f"the plan has version {self.version}; this Penstock reads version 1, so plan again"
            )
        self._check_numbers()
        check_layers(self.stages, any_rank=bool(self._given_replicas))
        self._settle_order()
        if self.schedule in USUAL and not self.versions.asynchronous:
            force_setattr(self, "versions", USUAL[self.schedule])
        self._check_placement(self.placement)
        self._check_replicas()
        check_devices(self.devices, self.num_ranks, self.num_tensor_ranks, self.stages)
        check_policy(self.versions, self.schedule, self.replicas, self.num_microbatches)
        # Follows from the policy, whoever wrote the file.
        stages = (
            replace(stage, weight_versions=weight_copies(self.versions, self.place(index)))
            for index, stage in enumerate(self.stages)
        )
        force_setattr(self, "stages", tuple(stages))

    def _check_numbers(self) -> None:
        least = {"num_microbatches": 1, "num_threads": 1, "num_tensor_ranks": 1}
        for name, smallest in {**least, "microbatch_size": 0}.items():
            whole(name, getattr(self, name), smallest, MOST_BYTES)
        given = [name for name in ("name", "num_ranks", "num_microbatches") if name in self.options]
        if given:
            raise InputError(
                f"options: {given[0]} is none, it follows from the rest of the plan; leave it out"
            )

    def _settle_order(self) -> None:
        """Search the order where it is needed and not there."""
        if self.schedule in families.SEARCHED:
            check_order_options(self.schedule, self.options)
            if not self.order:
                found = search_order(
                    self.schedule,
                    self.stages,
                    self.num_microbatches,
                    self.options,
                    self._limits,
                )
                force_setattr(self, "order", written(found))
        elif self.order:
            searched = " or ".join(sorted(families.SEARCHED))
            raise InputError(
                f"order: {self.schedule} makes its own; leave order out, or take {searched}"
            )

    def _check_replicas(self) -> None:
        # Without a flush, a minibatch may end between two replicas.
        if not self.versions.asynchronous and self.num_microbatches < max(self.replicas):
            raise InputError(
                f"a stage has {max(self.replicas)} replicas, but a minibatch has only "
                f"{count_of(self.num_microbatches, 'microbatch', 'es')}; each replica needs one"
            )

    def _check_placement(self, schedule: Schedule) -> None:
        if schedule.num_stages != len(self.stages):
            raise InputError(
                f"{self.schedule} on {self.num_ranks} ranks has {schedule.num_stages} stages, but "
                f"the plan has {len(self.stages)}"
            )
        for index, stage in enumerate(self.stages):
            ranks = schedule.ranks_of(index)
            if self._given_replicas:
                ranks = ranks[:1]
            if stage.rank not in ranks:
                raise InputError(
                    f"stage {index} is on rank {stage.rank}, but {self.schedule} runs it on rank "
                    f"{', '.join(map(str, ranks))}"
                )

    @property
    def _limits(self) -> list[float]:
        """Bytes that each rank may use; no limits where nobody says, or too many do."""
        leaders = self.devices[:: self.num_tensor_ranks]
        limits = [device.memory_bytes or inf for device in leaders]
        return limits if len(limits) == self.num_ranks else [inf] * self.num_ranks

    @property
    def num_ranks(self) -> int:
        """How many ranks it runs on."""
        if self._given_replicas:
            return sum(self._given_replicas)
        return 1 + max(stage.rank for stage in self.stages)

    @property
    def _given_replicas(self) -> tuple[int, ...]:
        return read_replicas(self.options.get("replicas", ()))

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many ranks hold each stage, each with microbatches of its own."""
        return self._given_replicas or (1,) * len(self.stages)

    @property
    def placement(self) -> Schedule:
        """A schedule of this plan in which every rank has something to do."""
        # Of a stream, as long as fills the pipeline.
        fills = filling(self.replicas) if self.versions.asynchronous else 1
        return self.build_schedule(max(self.num_microbatches, fills, *self.replicas))

    def place(self, stage: int) -> Place:
        """Where a stage stands, as weight-version policies ask for it."""
        return place_of(self.versions, self.replicas, stage, self.num_microbatches)

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Predicted memory of each rank."""
        return bytes_of_ranks(self.stages, self.placement)

    @property
    def updates_per_minibatch(self) -> tuple[float, ...]:
        """Of each stage."""
        if self.versions.updates == "minibatch":
            return (1.0,) * len(self.stages)
        return tuple(self.num_microbatches / count for count in self.replicas)

    @property
    def one_device_seconds(self) -> float:
        """A step without a pipeline, as the planner predicted it; where it did not, every op of
        every stage and microbatch, one after another."""
        for one in self.alternatives:
            if one.label == "single device":
                return one.step_seconds
        return self.work_seconds

    @property
    def work_seconds(self) -> float:
        """What all ranks together work for a minibatch, updates included."""
        compute = sum(
            stage.compute_seconds + (stage.again_seconds if stage.recompute != "none" else 0.0)
            for stage in self.stages
        )
        parts = zip(self.stages, self.updates_per_minibatch, self.replicas, strict=True)
        updates = sum(stage.update_seconds * count * ranks for stage, count, ranks in parts)
        return self.num_microbatches * compute + updates

    @property
    def step_seconds(self) -> float:
        """The predicted time of a minibatch, weight update included; without a flush, in the steady
        state."""
        if not self.versions.asynchronous:
            return self.simulate().makespan
        return steady_seconds(
            self.build_schedule, self.versions, self.costs, self.num_microbatches, self.replicas
        )

    @property
    def costs(self) -> Costs:
        """The predicted costs, stage by stage."""
        return costs_of(self.stages)

    @property
    def sizes(self) -> Sizes:
        """Bytes of activations that one microbatch keeps at each stage, for
        ``Timeline.peak_bytes``."""
        return sizes_of(self.stages)

    def build_schedule(self, num_microbatches: int | None = None) -> Schedule:
        """The checked schedule, for this or another number of microbatches."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        schedule = self._compute_only(count)
        again = [index for index, stage in enumerate(self.stages) if stage.recompute == "stage"]
        if again:
            schedule = add_recompute(schedule, again)
        check(schedule)
        return schedule

    def _compute_only(self, count: int) -> Schedule:
        if self.order:
            own = read_order(self.order, self.schedule, self.num_ranks, self.num_microbatches)
            return with_microbatches(own, count)
        build = partial(families.build, self.schedule, num_ranks=self.num_ranks, **self.options)
        try:
            return build(num_microbatches=count)
        except InputError:
            if count >= self.num_microbatches or self.versions.asynchronous:
                raise
            # The family wants more; what is left of a longer schedule is one, too.
            return first_microbatches(build(num_microbatches=self.num_microbatches), count)

    def recomputing(self, how: Recompute, stages: Collection[int] | None = None) -> Plan:
        """This plan with some stages keeping less and running forward twice.

        Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

        Args:
            how: ``"stage"`` keeps only the stage's input, ``"layers"`` the input of every layer,
                ``"none"`` everything.
            stages: their numbers; all by default.

        Raises:
            InputError: no such way, or no such stage.
        """
        one_of("how", how, get_args(Recompute))
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

    def reading(self, versions: Policy) -> Plan:
        """This plan with another weight-version policy.

        Args:
            versions: for the plan's kind of schedule.

        Raises:
            InputError: the policy does not go with the schedule.
        """
        expect(versions, Policy, "versions", "take one of penstock.versions, as in Stash()")
        return replace(self, versions=versions)

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
        if not self.versions.asynchronous:
            return simulate(add_update(self.build_schedule()), self.costs)
        fills = ceil(3 * self.num_ranks / self.num_microbatches) + 1
        stream, rounds = stream_of(
            self.build_schedule,
            self.versions,
            num_minibatches or fills,
            self.num_microbatches,
            self.replicas,
        )
        read = versions_read(stream, self.versions, rounds)
        return simulate(stream, self.costs).with_versions(read)

    def __str__(self) -> str:
        title = (
            f"{self.schedule}: {count_of(len(self.stages), 'stage')} on "
            f"{count_of(self.num_ranks, 'rank')}, "
            f"{count_of(self.num_microbatches, 'microbatch', 'es')}"
        )
        if self.versions.asynchronous:
            title += f", versions: {self.versions.name}"
        sheet = render(
            title,
            self.stages,
            self.simulate(),
            self.step_seconds,
            self.one_device_seconds,
            replicas=self.replicas,
            rank_bytes=self.rank_bytes,
            flushes=not self.versions.asynchronous,
        )
        return argued(sheet, self.alternatives, self.reason, self.contention, self.warnings)

    def check_runnable(self) -> None:
        """Raise ``InputError`` if the runtime cannot perform it."""
        if self.num_tensor_ranks > 1:
            raise InputError(
                f"the plan splits layers over {self.num_tensor_ranks} devices, which Penstock can "
                "plan and draw but not run yet; plan with tensor_ranks=1"
            )
        check_kinds(self.devices)

    def check_model(self, names: Sequence[str], model_fingerprint: str) -> None:
        """Raise ``ModelError`` unless this plan was made for a model with these layers."""
        planned = [name for stage in self.stages for name in stage.layers]
        if planned != list(names):
            missing = [name for name in names if name not in planned]
            unknown = [name for name in planned if name not in names]
            detail = (
                f"not in the plan: {', '.join(missing) or 'none'}; "
                f"not in the model: {', '.join(unknown) or 'none'}"
                if missing or unknown
                else "the order of the layers differs; .ordered(names) changes a captured model's"
            )
            raise ModelError(
                f"the plan was made for another model ({detail}); profile and plan this one"
            )
        if model_fingerprint != self.model:
            raise ModelError(
                "the plan was made for another model: the layers have the same names but other "
                "parameter shapes or dtypes; profile and plan this one"
            )
