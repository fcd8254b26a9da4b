"""What a plan is called: in a line of its own, and within a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.base.units import count_of
from penstock.core.versions import Policy
from penstock.planning.plans.shape import Shape


def title(plan: Shape) -> str:
    """The schedule and how many stages, ranks and microbatches, for text.

    >>> from penstock.planning.plans import Plan, StagePlan
    >>> stage = StagePlan(layers=("a",), rank=0)
    >>> title(Plan(model="m", schedule="1f1b", num_microbatches=8, stages=(stage,)))
    '1f1b: 1 stage on 1 rank, 8 microbatches'
    """
    return ", ".join(
        [_shape(plan), _microbatches(plan), *_versions(plan), *_summing(plan), *_tier(plan)]
    )


def full_title(plan: Shape) -> str:
    """As ``title``, with devices per rank and rows per microbatch, for pictures."""
    sizes = {*plan.group_sizes}
    each = f"{max(sizes)} devices each" if len(sizes) == 1 else f"{plan.num_seats} devices"
    devices = [each] if max(sizes) > 1 else []
    rows = f" of {plan.microbatch_size}" if plan.microbatch_size else ""
    rest = [*_versions(plan), *_summing(plan), *_tier(plan)]
    return ", ".join([_shape(plan), *devices, _microbatches(plan) + rows, *rest])


def family_title(schedule: str, replicas: Sequence[int], versions: Policy) -> str:
    """A schedule family with its replicas and its policy where it has any, as in
    ``pipedream 2-1 (stash)``."""
    words = [schedule]
    words += ["-".join(map(str, replicas))] if replicas else []
    words += [f"({versions.name})"] if versions.asynchronous else []
    return " ".join(words)


def _shape(plan: Shape) -> str:
    stages, ranks = count_of(len(plan.stages), "stage"), count_of(plan.num_ranks, "rank")
    return f"{plan.schedule}: {stages} on {ranks}"


def _microbatches(plan: Shape) -> str:
    return count_of(plan.num_microbatches, "microbatch", "es")


def _tier(plan: Shape) -> list[str]:
    said = [] if plan.spill is None else [f"stages come from {plan.spill.tier} and leave again"]
    if plan.offload is not None:
        count = len(plan.offload.chosen(len(plan.stages)))
        said.append(f"activations of {count_of(count, 'stage')} wait in {plan.offload.tier}")
    return said


def _versions(plan: Shape) -> list[str]:
    return [f"versions: {plan.versions.name}"] if plan.versions.asynchronous else []


def _summing(plan: Shape) -> list[str]:
    reducer, servers = plan.summing.reducer, len(plan.summing.servers)
    if reducer == "owners":
        return []
    if reducer == "parameter-server":
        stale = plan.summing.stale
        late = f", up to {count_of(stale, 'update')} late" if stale else ""
        return [f"gradients: {count_of(max(servers, 1), 'parameter server')}{late}"]
    return [f"gradients: {count_of(servers, 'server') if servers else reducer}"]
