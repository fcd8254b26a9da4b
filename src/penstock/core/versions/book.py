"""Accounts of versions: what each op of a stage reads, and which must live; which policies go with
which plans, and what they cost there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.base.errors import InputError
from penstock.core.schedule.op import RELEASING, Kind, Op
from penstock.core.schedule.rounds import Rounds, fewest_per_update, warm_up
from penstock.core.versions.policies import (
    USUAL,
    DoubleBuffer,
    PipeMare,
    Place,
    Policy,
    VerticalSync,
)

if TYPE_CHECKING:
    from penstock.core.schedule.schedule import Schedule


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


@dataclass(frozen=True)
class Trace:
    """The versions of the weights that the ops of one rank read.

    Attributes:
        versions: one number per op: the version that an F, B, I, W or R reads; how many updates
            came before an UPDATE; −1 for all others.
        held: by stage, the most versions that are alive at once.
    """

    versions: tuple[int, ...]
    held: dict[int, int]


def trace(ops: Sequence[Op], policy: Policy, rounds: Rounds, num_stages: int) -> Trace:
    """Follow one rank of a stream and say which version every op reads, as the runtime does.

    Args:
        ops: all that the rank performs, updates included (``schedule.lower.add_updates``).
        rounds: say which update a microbatch's gradient is part of.
    """
    stages: dict[int, VersionBook] = {}
    versions = []
    for op in ops:
        book = stages.setdefault(op.stage, VersionBook(policy, rounds, op.stage, num_stages))
        versions.append(book.read(op))
    return Trace(tuple(versions), {stage: book.most for stage, book in stages.items()})


def versions_read(stream: Schedule, policy: Policy, rounds: Rounds) -> list[tuple[int, ...]]:
    """The version that each op of a stream reads: one tuple per rank, as ``trace`` gives it.

    Args:
        stream: with updates.
        rounds: say which update a microbatch's gradient is part of.
    """
    return [trace(ops, policy, rounds, stream.num_stages).versions for ops in stream.ranks]


class VersionBook:
    """Keeps account of one stage's versions on one rank: what each op reads, and what must be kept.

    Attributes:
        newest: the version that the last update made; how many updates there have been.
        live: the versions that a pass in flight has read or a coming one will read.
        most: the most of them that were alive at once.
    """

    def __init__(self, policy: Policy, rounds: Rounds, stage: int, num_stages: int) -> None:
        self.newest = 0
        self.most = 1
        self._policy = policy
        self._rounds = rounds
        self._stage = stage
        self._num_stages = num_stages
        self._in_flight: dict[int, int] = {}
        self._next_round = 0

    def read(self, op: Op) -> int:
        """The version that an op reads; for an update, how many came before it; else −1."""
        match op.kind:
            case Kind.FORWARD:
                return self._forward(op.microbatch)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT | Kind.BACKWARD_WEIGHT | Kind.RECOMPUTE:
                version = self._in_flight[op.microbatch] if self._policy.stashes else self.newest
                if op.kind in RELEASING:
                    del self._in_flight[op.microbatch]
                return version
            case Kind.UPDATE:
                self.newest += 1
                self.most = max(self.most, len(self.live))
                return self.newest - 1
        return -1

    def _forward(self, microbatch: int) -> int:
        round_ = self._rounds.of(self._stage, microbatch)
        version = self._policy.forward_version(round_, self.newest, self._num_stages)
        self._in_flight[microbatch] = version
        following = microbatch + self._rounds.replicas[self._stage]
        self._next_round = self._rounds.of(self._stage, following)
        return version

    @property
    def live(self) -> set[int]:
        """Versions that something in flight has read, that a later forward will read, and the
        newest."""
        if not self._policy.stashes:
            return {self.newest}
        coming = self._policy.forward_version(self._next_round, self.newest, self._num_stages)
        kept = range(min(coming, self.newest), self.newest + 1)
        return {*kept, *self._in_flight.values()}
