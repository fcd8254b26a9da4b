"""Which policies go with which plans, and what they cost there."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.base.errors import InputError
from penstock.core.schedule import Schedule
from penstock.core.schedule.rounds import Rounds, fewest_per_update, warm_up
from penstock.core.versions.base import Place
from penstock.core.versions.policies import USUAL, DoubleBuffer, PipeMare, Policy, VerticalSync


def place_of(policy: Policy, replicas: Sequence[int], stage: int, num_microbatches: int) -> Place:
    """Where a stage stands in its pipeline, as far as a policy asks about it.

    Args:
        policy: says what an update is made of.
        replicas: how many each stage has.
    """
    whole = policy.updates == "minibatch"
    per_update = num_microbatches / replicas[stage] if whole else 1.0
    return Place(stage, len(replicas), warm_up(replicas, stage, policy.ahead), per_update)


def rounds_of(policy: Policy, schedule: Schedule, minibatch: int) -> Rounds:
    """When the stages of a stream update.

    Args:
        policy: says what an update is made of.
        schedule: of the whole stream.
        minibatch: microbatches of each minibatch but perhaps the last.

    Raises:
        InputError: minibatches are too short for the policy.
    """
    replicas = tuple(schedule.copies[stage] for stage in range(schedule.num_stages))
    check_policy(policy, policy.family, replicas, minibatch)
    if policy.updates == "microbatch":
        return Rounds(replicas)
    return Rounds.of_minibatches(replicas, minibatch, schedule.num_microbatches)


def weight_copies(policy: Policy, place: Place) -> int:
    """Versions of a stage's weights and buffers as large, altogether."""
    return policy.versions_held(place) + policy.extra_copies(place)


def least_minibatch(policy: Policy, replicas: Sequence[int]) -> int:
    """The fewest microbatches of a minibatch with which a policy keeps what it promises: under 2BW,
    as many as may be in flight behind it, p−1 without replicas."""
    return fewest_per_update(replicas) if isinstance(policy, DoubleBuffer) else 1


def check_policy(
    policy: Policy, schedule: str, replicas: Sequence[int], num_microbatches: int
) -> None:
    """Raise ``InputError`` if a policy does not go with a plan.

    Args:
        schedule: the name of the plan's family.
        replicas: how many each stage has.
    """
    usual = USUAL.get(schedule)
    if usual is not None and usual.activations == "newest" and policy.activations == "own":
        raise InputError(
            f"{schedule} goes back through the newest activations, with the weights that made "
            f"them, so {policy.name} has no other weights to read; leave versions out, or take "
            f"{policy.name} with the schedule {policy.family}"
        )
    if policy.asynchronous and policy.family != schedule:
        raise InputError(
            f"the policy {policy.name} is for the schedule {policy.family}, but the plan's is "
            f"{schedule}; change one of them"
        )
    if policy.asynchronous and policy.updates == "minibatch":
        least = max(least_minibatch(policy, replicas), *replicas)
        if num_microbatches < least:
            raise InputError(
                f"{policy.name} with {len(replicas)} stages needs minibatches of {least} "
                f"microbatches or more, but there are {num_microbatches}"
            )
    if policy.activations == "newest" and max(replicas) > 1:
        raise InputError(
            f"{schedule} has one rank for each stage, because a gradient goes through the frame "
            f"that its stage has just seen; leave replicas {'-'.join(map(str, replicas))} out, and "
            "cut the model into more stages"
        )
    if isinstance(policy, PipeMare) and policy.t3 and num_microbatches < max(replicas):
        raise InputError(
            f"a stage has {max(replicas)} replicas, but the minibatches that PipeMare's t3 makes "
            f"synchronous have {num_microbatches} microbatches; each replica needs at least one"
        )
    if isinstance(policy, VerticalSync) and len(set(replicas)) > 1:
        raise InputError(
            "vertical sync needs as many replicas of every stage, because versions are counted per "
            f"stage; the plan has {'-'.join(map(str, replicas))}"
        )
