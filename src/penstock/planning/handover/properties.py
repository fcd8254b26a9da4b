"""``PROPERTIES`` of plans that not every engine knows: where a plan has one, and the nearest plan
without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from penstock.core.schedule import Schedule, families
from penstock.core.schedule.families.side_by_side import first_pipeline
from penstock.core.schedule.memory import peak_activations
from penstock.core.versions import Flush
from penstock.planning.handover.capabilities import Capabilities, Property
from penstock.planning.plans import Plan, StagePlan

Placement = str
"""``"straight"``: a stage per rank; ``"loop"``: stage s of p ranks on rank s mod p; ``"v"``: stages
0 to p−1 down the ranks and the others back; ``""``: none of these."""

_PLAIN, _LOOPED = "1f1b", "interleaved-1f1b"


class PlanProperty(NamedTuple):
    """A property of plans.

    Attributes:
        where: says where a plan has it, in words; empty where it has not.
        without: the plan nearest to it without; ``None`` where there is none that is near.
    """

    where: Callable[[Plan, Capabilities], str]
    without: Callable[[Plan, Capabilities], Plan | None]


def _of_plans(where: Callable[[Plan], str], without: Callable[[Plan], Plan | None]) -> PlanProperty:
    """A property that plans have whatever the engine."""
    return PlanProperty(lambda plan, _: where(plan), lambda plan, _: without(plan))


def placement_of(stages_of: tuple[tuple[int, ...], ...]) -> Placement:
    """How stages lie on ranks.

    >>> placement_of(((0, 3), (1, 2)))
    'v'
    """
    count = len(stages_of)
    number = sum(map(len, stages_of))
    if all(len(own) == 1 for own in stages_of):
        return "straight"
    if all(own == tuple(range(rank, number, count)) for rank, own in enumerate(stages_of)):
        return "loop"
    if number == 2 * count and all(
        own == (rank, number - 1 - rank) for rank, own in enumerate(stages_of)
    ):
        return "v"
    return ""


def placement(plan: Plan) -> Placement:
    """How the stages of a plan lie on the ranks of one of its copies."""
    copies = _num_copies(plan)
    if copies == 1 and max(plan.replicas) > 1:
        return "straight"
    return placement_of(tuple(tuple(sorted(own)) for own in plan.placement.stages_of[::copies]))


def _num_copies(plan: Plan) -> int:
    """How many replicas every stage has; 1 where they have unlike numbers."""
    return plan.replicas[0] if len({*plan.replicas}) == 1 else 1


def _depth(plan: Plan) -> int:
    """How many ranks one copy of a plan has whose stages all have as many replicas."""
    return plan.num_ranks // _num_copies(plan)


def one_copy(plan: Plan) -> Schedule:
    """The order of compute in one of the copies of a plan whose stages all have as many, with its
    share of the microbatches; without recomputes."""
    bare = plan.recomputing("none").offloading(None)
    return first_pipeline(bare.build_schedule(), max(plan.replicas))


def with_family(plan: Plan, family: str, num_ranks: int | None = None) -> Plan:
    """A plan with the same stages in another order, and on the ranks on which that has them.

    Args:
        num_ranks: of a copy; by default as many as before.
    """
    copies = _num_copies(plan)
    is_uneven = len({*plan.replicas}) > 1
    ranks = num_ranks or (len(plan.stages) if is_uneven else _depth(plan))
    options: dict[str, object] = {"replicas": [copies] * len(plan.stages)} if copies > 1 else {}
    if family == _LOOPED:
        options["stages_per_rank"] = len(plan.stages) // ranks
    return _placed(plan, family, options, ranks * copies)


def _placed(plan: Plan, family: str, options: dict[str, object], num_ranks: int) -> Plan:
    schedule = families.build(
        family, num_ranks=num_ranks, num_microbatches=plan.num_microbatches, **options
    )
    peaks = peak_activations(schedule.rank_ops, schedule.num_slices)
    ranks = [schedule.ranks_of(index)[0] for index in range(len(plan.stages))]
    stages = tuple(
        replace(stage, rank=rank, peak_activations=peaks[rank])
        for stage, rank in zip(plan.stages, ranks, strict=True)
    )
    return plan.edited(
        schedule=family,
        options=options,
        order=(),
        versions=Flush(),
        stages=stages,
        devices=plan.devices if num_ranks == plan.num_ranks else (),
    )


def _plain(plan: Plan) -> Plan:
    return with_family(plan, _PLAIN)


def _uneven_replicas(plan: Plan) -> str:
    counts = plan.replicas
    return f"its stages have {'-'.join(map(str, counts))} replicas" if len({*counts}) > 1 else ""


def _copied(plan: Plan, copies: int) -> Plan:
    """The plan with as many replicas of every stage, each with as many microbatches."""
    while plan.num_microbatches % copies:
        copies -= 1
    single = plan if copies > 1 else plan.with_reducer("owners")
    replicas: dict[str, object] = {"replicas": [copies] * len(plan.stages)} if copies > 1 else {}
    if plan.schedule in families.UNLIKE_REPLICAS:
        return _placed(single, _PLAIN, replicas, copies * len(plan.stages))
    kept = {name: value for name, value in plan.options.items() if name != "replicas"}
    return _placed(single, plan.schedule, kept | replicas, copies * _depth(plan))


def _uneven_shares(plan: Plan) -> str:
    copies = max(plan.replicas)
    if plan.num_microbatches % copies == 0:
        return ""
    return f"{plan.num_microbatches} microbatches are no equal shares for {copies} replicas"


def _tensor_sizes(plan: Plan) -> str:
    sizes = sorted({stage.tensor_ranks for stage in plan.stages})
    return f"its stages have {' and '.join(map(str, sizes))} tensor ranks" if len(sizes) > 1 else ""


def _tensor_groups(plan: Plan) -> str:
    count = plan.num_tensor_ranks
    return f"{count} devices share every layer" if count > 1 else ""


def _experts(plan: Plan) -> str:
    count = max(stage.expert_ranks for stage in plan.stages)
    return f"{count} copies of a stage divide its experts" if count > 1 else ""


def _summing(plan: Plan) -> str:
    reducer = plan.summing.reducer
    is_served = reducer in ("servers", "parameter-server")
    return f"gradients are summed by {reducer}" if is_served and max(plan.replicas) > 1 else ""


def _lies(*kinds: Placement) -> Callable[[Plan], str]:
    def where(plan: Plan) -> str:
        if placement(plan) not in kinds:
            return ""
        stages = plan.placement.stages_of[0]
        return f"{plan.schedule} has stages {', '.join(map(str, stages))} on rank 0"

    return where


def _looped(plan: Plan) -> Plan | None:
    """The plan with stage s on rank s mod p, if each rank then has as many."""
    ranks = _depth(plan)
    if len(plan.stages) % ranks or plan.num_microbatches % plan.num_ranks:
        return None
    return with_family(plan, _LOOPED)


def _last_round(plan: Plan) -> str:
    """The microbatches of a round with fewer than ranks, where ranks have several stages."""
    ranks, share = _depth(plan), plan.num_microbatches // _num_copies(plan)
    if placement(plan) == "straight" or share % ranks == 0:
        return ""
    return (
        f"its {share} microbatches are no multiple of the {ranks} ranks that "
        "have several stages each"
    )


def _merged(plan: Plan) -> Plan | None:
    """The plan with one stage per rank, each of as many neighbouring stages as ranks had before."""
    ranks, copies, count = _depth(plan), _num_copies(plan), len(plan.stages)
    if count % ranks:
        return None
    width = count // ranks
    stages = tuple(_sum_of(plan.stages[first : first + width]) for first in range(0, count, width))
    renumbered = tuple(replace(stage, rank=copies * place) for place, stage in enumerate(stages))
    options = {"replicas": [copies] * ranks} if copies > 1 else {}
    merged = plan.edited(
        schedule=_PLAIN, options=options, order=(), versions=Flush(), stages=renumbered
    )
    return with_family(merged, _PLAIN)


_SUMMED = (
    "forward_seconds", "backward_input_seconds", "backward_weight_seconds", "split_seconds",
    "update_seconds", "parameter_bytes", "optimizer_bytes", "buffer_bytes", "sum_bytes",
    "activation_bytes", "weight_kept_bytes", "layer_input_bytes",
)  # fmt: skip


def _sum_of(stages: tuple[StagePlan, ...]) -> StagePlan:
    """Neighbouring stages as one."""
    first, last = stages[0], stages[-1]
    summed = {name: sum(getattr(stage, name) for stage in stages) for name in _SUMMED}
    return replace(
        last,
        expert_ranks=max(stage.expert_ranks for stage in stages),
        layers=tuple(layer for stage in stages for layer in stage.layers),
        input_bytes=first.input_bytes,
        workspace_bytes=max(stage.workspace_bytes for stage in stages),
        weight_bytes=_if_other(sum(s.held_bytes for s in stages), summed["parameter_bytes"]),
        gradient_bytes=_if_other(sum(s.summed_bytes for s in stages), summed["parameter_bytes"]),
        recompute_seconds=sum(stage.again_seconds for stage in stages),
        splits={key: how for stage in stages for key, how in stage.splits.items()},
        recompute="none" if all(s.recompute == "none" for s in stages) else "layers",
        **summed,
    )


def _if_other(size: int, usual: int) -> int | None:
    return None if size == usual else size


def _by_stage(plan: Plan) -> str:
    stage = next((index for index, own in enumerate(plan.stages) if own.recompute == "stage"), None)
    return "" if stage is None else f"stage {stage} runs forward twice as a whole"


def _in_some(plan: Plan) -> str:
    again = [index for index, stage in enumerate(plan.stages) if stage.recompute != "none"]
    if len(again) in (0, len(plan.stages)):
        return ""
    return f"only stages {', '.join(map(str, again))} recompute"


def _stages_to_layers(plan: Plan) -> Plan:
    chosen = [index for index, own in enumerate(plan.stages) if own.recompute == "stage"]
    return plan.recomputing("layers", chosen)


def _order(plan: Plan, engine: Capabilities) -> str:
    """The order that an engine has no name for; empty where it has one, or takes any order."""
    return "" if engine.runs(plan.schedule) else f"its order is {plan.schedule}"


def _with_order(plan: Plan, engine: Capabilities) -> Plan | None:
    """The plan in an engine's own order for stages that lie so."""
    if placement(plan) == "straight":
        return with_family(plan, engine.families[0])
    return _looped(plan)


PROPERTIES: dict[Property, PlanProperty] = {
    "no flush": _of_plans(
        lambda plan: f"{plan.schedule} never flushes" if plan.versions.asynchronous else "", _plain
    ),
    "stages that come and go": _of_plans(
        lambda plan: "its stages come from a tier and leave again" if plan.spill else "",
        lambda _: None,
    ),
    "activations that leave": _of_plans(
        lambda plan: "activations wait in a tier" if plan.offload else "",
        lambda plan: plan.offloading(None),
    ),
    "slices": _of_plans(
        lambda plan: (
            f"{plan.schedule} cuts sequences into slices" if plan.placement.num_slices > 1 else ""
        ),
        _plain,
    ),
    "late gradients": _of_plans(
        lambda plan: (
            f"gradients may be {plan.summing.stale} updates late" if plan.summing.stale else ""
        ),
        lambda plan: plan.with_reducer("owners"),
    ),
    "summation servers": _of_plans(_summing, lambda plan: plan.with_reducer("owners")),
    "uneven replicas": _of_plans(_uneven_replicas, lambda plan: _copied(plan, min(plan.replicas))),
    "uneven shares": _of_plans(
        lambda plan: "" if _uneven_replicas(plan) else _uneven_shares(plan),
        lambda plan: _copied(plan, max(plan.replicas)),
    ),
    "uneven tensor groups": _of_plans(_tensor_sizes, lambda _: None),
    "tensor groups": _of_plans(_tensor_groups, lambda _: None),
    "divided experts": _of_plans(_experts, lambda plan: plan.with_expert_ranks(1)),
    "another placement": _of_plans(_lies(""), _looped),
    "a V of stages": _of_plans(_lies("v"), _looped),
    "several stages per rank": _of_plans(_lies("loop", "v", ""), _merged),
    "an order of its own": PlanProperty(_order, _with_order),
    "a last round of microbatches": _of_plans(_last_round, _merged),
    "recompute by stage": _of_plans(_by_stage, _stages_to_layers),
    "recompute in some stages": _of_plans(_in_some, lambda plan: plan.recomputing("layers")),
}
"""In the order in which they are looked at: what decides about ranks before what decides about
their order."""
