"""An account of versions: what each op of a stage reads, and which must live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.schedule import Kind, Op, Schedule
from penstock.core.schedule.op import RELEASING
from penstock.core.schedule.rounds import Rounds
from penstock.core.versions.policies import Policy


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
