"""Orders that are searched for one plan: under its stages' costs, in the memory that is left.

Before there are stages, a ``stand_in`` says what such an order keeps in flight. Once there are,
``search_order`` finds the order, which the plan then carries as text: nothing else rebuilds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import ceil, inf
from typing import Any

from msgspec.structs import replace as with_fields

from penstock.base.errors import InputError, ScheduleError
from penstock.base.units import count_of
from penstock.core.schedule import Schedule, families
from penstock.core.schedule.check import check
from penstock.core.schedule.families.options import one_per_rank, placed, read_replicas
from penstock.core.schedule.families.searched import check_size
from penstock.core.schedule.memory import Sizes
from penstock.core.schedule.op import COMPUTE
from penstock.core.timing.costs import Costs
from penstock.planning.plans.stage_plan import StagePlan, costs_of


def stand_in(
    family: str, num_ranks: int, num_microbatches: int, options: Mapping[str, Any]
) -> Schedule:
    """An order in the place of a searched one, under the same limit, found quickly and for F = I =
    W: it shows what is in flight before the costs are known.

    Args:
        family: one of ``families.SEARCHED``.

    Raises:
        InputError: the family refuses.
    """
    if family == "optimal":
        copies = _copies(options)
        check_size(num_ranks // copies, ceil(num_microbatches / copies))
        options = {"activation_limit": inf, **options}
        options.pop("time_limit_seconds", None)
    quick = {**options, "effort": 0}
    schedule = families.build(
        "zb-auto", num_ranks=num_ranks, num_microbatches=num_microbatches, **quick
    )
    return schedule.renamed(family)


def search_order(
    family: str,
    stages: Sequence[StagePlan],
    num_microbatches: int,
    options: Mapping[str, Any],
    limits: Sequence[float],
) -> Schedule:
    """The order that a family finds for stages.

    Args:
        family: one of ``families.SEARCHED``.
        stages: with their ranks, costs and sizes; what runs forward twice counts as a longer
            backward.
        options: of the family. ``activation_limit`` is in microbatches of a rank's layers.
        limits: bytes that each rank may use; infinite where there is no limit. Where they are
            missed even with one microbatch in flight, one is in flight.

    Raises:
        InputError: the family refuses, or its placement is not that of the stages.
    """
    copies, given = _copies(options), dict(options)
    # All pipelines side by side have the order that fits the memory of each.
    stages = [with_fields(stage, rank=stage.rank // copies) for stage in stages]
    limits = [min(limits[first : first + copies]) for first in range(0, len(limits), copies)]
    placement = tuple(stage.rank for stage in stages)
    num_ranks = 1 + max(placement)
    wanted = placed(family, num_ranks, given.pop("placement", placement))
    if wanted != placement:
        raise InputError(
            f"options: placement puts stages on ranks {list(wanted)}, but the stages name "
            f"{list(placement)}; change one of them"
        )
    default = inf if family == "optimal" else num_ranks
    asked = one_per_rank(
        family, "activation_limit", given.pop("activation_limit", default), num_ranks
    )
    units = [_unit(family, rank_stages) for rank_stages in _stages_of(stages, num_ranks)]
    left = _left(stages, limits)
    room = [
        max(1.0, min(most, has / unit if unit else inf))
        for most, has, unit in zip(asked, left, units, strict=True)
    ]
    if family == "zb-auto" and all(units):
        given["sizes"] = Sizes(
            [_kept(stage) / units[stage.rank] for stage in stages],
            [stage.weight_kept_bytes / units[stage.rank] for stage in stages],
        )
    return families.build(
        family,
        num_ranks=num_ranks * copies,
        num_microbatches=num_microbatches,
        costs=_costs(stages),
        placement=placement,
        activation_limit=room,
        **given,
    )


def _copies(options: Mapping[str, Any]) -> int:
    """How many pipelines stand side by side."""
    return max(read_replicas(options.get("replicas", "")), default=1)


def _stages_of(stages: Sequence[StagePlan], num_ranks: int) -> Iterator[list[StagePlan]]:
    for rank in range(num_ranks):
        yield [stage for stage in stages if stage.rank == rank]


def _kept(stage: StagePlan) -> int:
    """Bytes of a microbatch from its forward until its weight gradient is done. Between the two
    halves of a backward it may be more than before, and a search looks at forwards only."""
    kept = stage.input_bytes if stage.recompute == "stage" else stage.kept_bytes
    return max(kept, stage.weight_kept_bytes)


def _unit(family: str, rank_stages: Sequence[StagePlan]) -> int:
    """Bytes of one microbatch on a rank with these stages, as the family counts."""
    kept = [_kept(stage) for stage in rank_stages]
    # The exact search takes all stages of a rank for equally large.
    return len(kept) * max(kept) if family == "optimal" else sum(kept)


def _left(stages: Sequence[StagePlan], limits: Sequence[float]) -> list[float]:
    """Bytes that each rank has left for microbatches in flight: without the state of its stages,
    and without what one microbatch more holds while its forward runs again."""
    left = list(limits)
    for rank, rank_stages in enumerate(_stages_of(stages, len(limits))):
        again = [stage.activation_bytes for stage in rank_stages if stage.recompute == "stage"]
        left[rank] -= sum(stage.state_bytes for stage in rank_stages) + max(again, default=0)
    return left


def _costs(stages: Sequence[StagePlan]) -> Costs | None:
    """The durations of ops; ``None``, and with it F = I = W, where nobody knows."""
    timed = [stage for stage in stages if stage.compute_seconds]
    if not timed:
        return None
    # A whole stage runs again right before its backward, as layers do.
    together = (
        with_fields(stage, recompute="layers") if stage.recompute == "stage" else stage
        for stage in stages
    )
    return costs_of(tuple(together))


def written(schedule: Schedule) -> tuple[str, ...]:
    """An order as a plan carries it: a line per rank, as in torch's CSV."""
    return tuple(str(schedule).splitlines())


def check_order_options(family: str, options: Collection[str]) -> None:
    """Raise ``InputError`` for options that a plan with a searched order cannot have.

    Args:
        family: one of ``families.SEARCHED``.
    """
    families.check_options(family, options)
    follows = [name for name in ("costs", "sizes") if name in options]
    if follows:
        raise InputError(
            f"options: {follows[0]} of a plan are those of its stages; leave {follows[0]} out"
        )


def read_order(
    order: Sequence[str],
    family: str,
    num_ranks: int,
    num_microbatches: int,
    replicas: Sequence[int],
) -> Schedule:
    """The schedule of an order that a plan carries.

    Args:
        order: as ``written`` gives it, perhaps edited by hand.
        replicas: of each stage.

    Raises:
        InputError: it is no order, or not for so many ranks and microbatches, or it cannot run.
    """
    remedy = "mend that, or take order out of the plan to have it searched again"
    try:
        schedule = Schedule.parse("\n".join(order))
        if schedule.num_ranks != num_ranks:
            raise ScheduleError(
                f"there are {schedule.num_ranks} lines for {num_ranks} ranks; write one for each"
            )
        other = next((op for op in schedule.where if op.kind not in COMPUTE or op.slice), None)
        if other is not None:
            raise ScheduleError(f"{other} is no op of whole microbatches; write F, B, I and W only")
        check(schedule)
        for stage, count in enumerate(replicas):
            ranks = schedule.ranks_of(stage)
            if len(ranks) > count:
                named = ", ".join(map(str, ranks))
                wanted = count_of(count, "rank")
                raise ScheduleError(f"stage {stage} stands on ranks {named}; give it {wanted}")
    except ScheduleError as error:
        raise InputError(f"order: {error}; {remedy}") from None
    if schedule.num_microbatches != num_microbatches:
        raise InputError(
            f"order is for {schedule.num_microbatches} microbatches, but num_microbatches is "
            f"{num_microbatches}; {remedy}"
        )
    return schedule.renamed(family)


def with_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """An order fitted to another number of microbatches: fewer leave the last ones out, more repeat
    it over and over again. Both keep what is in flight."""
    count = schedule.num_microbatches
    turns = range(ceil(num_microbatches / count))
    ranks = (
        (
            op._replace(microbatch=op.microbatch + turn * count)
            for turn in turns
            for op in ops
            if op.microbatch + turn * count < num_microbatches
        )
        for ops in schedule.ranks
    )
    return schedule.with_ranks(ranks)
