"""The atoms of every schedule: an ``Op`` is *what* happens to *which* microbatch at *which* stage.

An op's text is the one torch uses in its CSV: stage, kind, microbatch, as in ``2F0``. Where a
microbatch is worked on in slices of its sequence, later slices add theirs, as in ``2F0.1``.

What an op waits for, and what travels between ranks, is read from one table, ``NEEDS``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from enum import StrEnum
from typing import Literal, NamedTuple

from penstock.base.errors import InputError, ScheduleError
from penstock.base.values import expect, is_whole, shown

Activations = Literal["own", "newest"]
"""Which activations a backward goes through: those of its own microbatch's forward, or those that
the newest forward of its stage has left."""


class Kind(StrEnum):
    """The kind of an op. Families emit the first four, passes add the others."""

    FORWARD = "F"
    BACKWARD = "B"
    """Full backward: input gradient and weight gradient in one."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    """Hand this stage's output to the next stage."""
    RECV_FORWARD = "RECV_F"
    """Wait for this stage's input from the previous stage."""
    SEND_BACKWARD = "SEND_B"
    """Hand the gradient of this stage's input to the previous stage."""
    RECV_BACKWARD = "RECV_B"
    """Wait for the gradient of this stage's output from the next stage."""
    RECOMPUTE = "R"
    """Run the forward once more from the kept input, because its activations were not kept."""
    FREE_INPUT_PART = "FREE_I"
    """Drop what only the input gradient needed; what the weight gradient needs stays."""
    FREE = "FREE"
    """Drop whatever is still kept of this microbatch at this stage."""
    REDUCE = "REDUCE"
    """Hand this rank's gradients, complete with this microbatch, to whoever shares their weights:
    the stage's other copies, or a stage with tied weights."""
    AGREE = "AGREE"
    """Wait until every rank has told its share of the gradients' norm and whether they are finite:
    what clipping and skipping an update depend on."""
    UPDATE = "UPDATE"
    """Apply the gradients of all microbatches up to this one to the stage's weights."""
    LATE_UPDATE = "LATE_UPDATE"
    """Apply the gradients of the minibatch before, which had to leave memory before all ranks could
    agree on them."""
    FETCH_FORWARD = "FETCH_F"
    """Begin to bring a stage's weights into memory, for forwards."""
    FETCH_BACKWARD = "FETCH_B"
    """Begin to bring a stage's weights into memory, for backwards; what the update behind them
    needs besides comes while they run."""
    LEAVE_FORWARD = "LEAVE_F"
    """Let a stage's weights go; they have not changed, so nothing is written (but behind a late
    update)."""
    LEAVE_BACKWARD = "LEAVE_B"
    """Let a stage go behind backwards, and write what changed: weights and optimizer state behind
    an update, gradients where none has come yet."""
    LEAVE_STASH = "LEAVE_S"
    """Let go what a microbatch keeps at this stage for its backward."""
    FETCH_STASH = "FETCH_S"
    """Begin to bring back what has left of a microbatch."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
"""Kinds that a schedule family emits."""
FORWARDS = frozenset({Kind.FORWARD, Kind.RECOMPUTE})
"""Kinds that run a stage's layers: the first time, or again."""
BACKWARD = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
"""Kinds that make the gradient of a stage's input."""
COMMUNICATION = frozenset(
    {Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD}
)
"""Kinds that move a tensor between stages."""
WAITING = COMMUNICATION | {Kind.AGREE}
"""Kinds whose time is spent waiting for other ranks."""
RELEASING = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
"""Kinds after which a microbatch's activations at this stage are no longer needed."""
FETCHES = frozenset({Kind.FETCH_FORWARD, Kind.FETCH_BACKWARD})
"""Kinds that bring a stage into memory."""
LEAVES = frozenset({Kind.LEAVE_FORWARD, Kind.LEAVE_BACKWARD})
"""Kinds that let a stage go out of memory."""
RESIDENCE = FETCHES | LEAVES
"""Kinds that say when a stage is in memory."""
STASHES = frozenset({Kind.LEAVE_STASH, Kind.FETCH_STASH})
"""Kinds that say when what a microbatch keeps for its backward is in memory."""
OF_A_ROUND = frozenset({Kind.REDUCE, Kind.UPDATE})
"""Kinds that stand once for all microbatches of a round, in the name of one of them."""

_TEXT = re.compile(
    r"(?P<stage>0|[1-9]\d{0,17})(?P<kind>"
    + "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
    + r")(?P<microbatch>0|[1-9]\d{0,17})(\.(?P<slice>[1-9]\d{0,17}))?"
)


class Op(NamedTuple):
    """One unit of work. Sorts by stage, kind, microbatch; its text is as in ``2F0``.

    Attributes:
        stage, kind, microbatch: which stage does what to which microbatch, counted from 0.
        slice: which slice of the microbatch's sequence; 0 where microbatches are not sliced.
    """

    stage: int
    kind: Kind
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        return f"{text}.{self.slice}" if self.slice else text

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read an op's text, strictly: nothing but a slice may follow the microbatch.

        >>> Op.parse("2F0.1")
        Op(stage=2, kind=<Kind.FORWARD: 'F'>, microbatch=0, slice=1)

        Raises:
            ScheduleError: the text is not an op.
        """
        expect(text, str, "an op", "write it as text, as in 2F0")
        match = _TEXT.fullmatch(text)
        if match is None:
            kinds = ", ".join(kind.value for kind in Kind)
            raise ScheduleError(
                f"{shown(text)} is not an op; write stage, kind, microbatch, as in 2F0 (kinds: "
                f"{kinds})"
            )
        numbers = int(match["stage"]), int(match["microbatch"]), int(match["slice"] or 0)
        return cls(numbers[0], Kind(match["kind"]), *numbers[1:])


_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_INPUT = ((0, Kind.RECV_FORWARD), (-1, _F))
_OUTPUT_GRADIENT = ((0, Kind.RECV_BACKWARD), (1, _I), (1, _B))
_ACTIVATIONS = ((0, Kind.RECOMPUTE), (0, _F))
_WEIGHT_GRADIENT = ((0, _W), (0, _B))

NEEDS: dict[Kind, tuple[tuple[tuple[int, Kind], ...], ...]] = {
    _F: (_INPUT,),
    _B: (_ACTIVATIONS, _OUTPUT_GRADIENT),
    _I: (_ACTIVATIONS, _OUTPUT_GRADIENT),
    _W: (((0, _I),),),
    Kind.SEND_FORWARD: (((0, _F),),),
    Kind.RECV_FORWARD: (((-1, Kind.SEND_FORWARD),),),
    Kind.SEND_BACKWARD: (((0, _I), (0, _B)),),
    Kind.RECV_BACKWARD: (((1, Kind.SEND_BACKWARD),),),
    Kind.RECOMPUTE: (((0, _F),),),
    Kind.FREE_INPUT_PART: (((0, _I),),),
    Kind.FREE: (_WEIGHT_GRADIENT,),
    Kind.REDUCE: (_WEIGHT_GRADIENT,),
    Kind.AGREE: (),
    Kind.UPDATE: (_WEIGHT_GRADIENT,),
    Kind.LATE_UPDATE: (),
    **dict.fromkeys(RESIDENCE, ()),
    Kind.LEAVE_STASH: (((0, _F),),),
    Kind.FETCH_STASH: (((0, Kind.LEAVE_STASH),),),
}
"""The needs of each kind. Every need lists (stages further, kind) of the ops that can meet it; the
first that is present does."""

BEFORE: dict[Kind, tuple[tuple[Kind, int], ...]] = {
    _F: ((_F, -1),),
    _B: ((_I, 1), (_B, 1), (Kind.FETCH_STASH, 0)),
    _I: ((_I, 1), (_B, 1), (Kind.FETCH_STASH, 0)),
    # The rest goes after the part that goes earlier, if that is said.
    Kind.FREE: ((Kind.FREE_INPUT_PART, 0),),
}
"""(kind, slices further) of what comes before each kind at its own stage, if it is present: slices
of one microbatch run forward in order, because a later slice attends to the earlier ones, and
backward in reverse. Earlier slices must be there."""


def dependencies(
    op: Op, last_stage: int, present: Container[Op], exchanges: Iterable[Op] = ()
) -> tuple[Op, ...]:
    """The ops whose results ``op`` needs: the one rule that check, passes, simulator and
    interpreter ask.

    Where a result can come from several kinds (a gradient from a full backward ``B`` or from an
    input backward ``I``; a tensor from a neighbour directly or through a receive), the op that is
    ``present`` is named; if none is, the last choice is named, so that a check can say what is
    missing.

    Args:
        present: the ops of the schedule.
        exchanges: the ``REDUCE`` and ``AGREE`` ops that an update waits for.

    >>> dependencies(Op(0, Kind.BACKWARD, 3), last_stage=1, present=())
    (Op(stage=0, kind=<Kind.FORWARD: 'F'>, microbatch=3, slice=0), \
Op(stage=1, kind=<Kind.BACKWARD: 'B'>, microbatch=3, slice=0))
    """
    stage, kind, microbatch, slice_ = op
    needed = []
    for choices in NEEDS[kind]:
        ops = [Op(stage + offset, kind, microbatch, slice_) for offset, kind in choices]
        # The chain ends here: the first stage reads the batch, the last one makes its gradient.
        if op.kind in COMPUTE and not 0 <= ops[-1].stage <= last_stage:
            continue
        needed.append(next((choice for choice in ops if choice in present), ops[-1]))
    for other, further in BEFORE.get(kind, ()):
        before = Op(stage, other, microbatch, slice_ + further)
        if before in present or 0 <= before.slice < slice_:
            needed.append(before)
    if kind is Kind.UPDATE:
        needed += exchanges
    return tuple(needed)


SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})

# The table of needs says what comes from where; here it is read from the sender's side, too.
RECEIVED_BY = {
    kind: receive
    for kind, needs in NEEDS.items()
    for ((_, receive), *_) in needs
    if receive in RECEIVES
}
"""The receive that brings a kind of compute what it needs from another rank."""
SENT_BY = {made: send for send in SENDS for _, made in NEEDS[send][0]}
"""The send that takes the result of a kind of compute to another rank."""
_SENDER = {receive: NEEDS[receive][0][0] for receive in RECEIVES}
OTHER_END = _SENDER | {send: (-offset, receive) for receive, (offset, send) in _SENDER.items()}
"""(stages further, kind) of the receive of a send, and of the send of a receive."""


def check_capacity(capacity: int | None) -> None:
    """Raise ``InputError`` unless a channel's capacity is ``None`` or a whole number ≥ 0."""
    if capacity is not None and (not is_whole(capacity) or capacity < 0):
        raise InputError(
            f"capacity is {capacity!r}, but a channel holds a whole number of messages; 0 is for "
            "channels that hold none and deliver in the order of sending"
        )


def other_end(op: Op) -> Op:
    """The receive of a send, the send of a receive."""
    offset, kind = OTHER_END[op.kind]
    return op._replace(stage=op.stage + offset, kind=kind)
