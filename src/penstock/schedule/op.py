"""The atoms of every schedule: an ``Op`` is *what* happens to *which* microbatch at *which* stage.

An op's text is the one torch uses in its CSV: stage, kind, microbatch, as in ``2F0``.
"""

from __future__ import annotations

import re
from collections.abc import Container
from enum import StrEnum
from typing import NamedTuple

from penstock.errors import ScheduleError


class Kind(StrEnum):
    """What an op does. Families emit the first four, passes add the others."""

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
    UPDATE = "UPDATE"
    """Apply the gradients of all microbatches up to this one to the stage's weights."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
"""Kinds that a schedule family emits."""
COMMUNICATION = frozenset(
    {Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD}
)
"""Kinds that move a tensor between stages."""
RELEASING = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
"""Kinds after which a microbatch's activations at this stage are no longer needed."""

_TEXT = re.compile(
    r"(?P<stage>0|[1-9]\d*)(?P<kind>"
    + "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
    + r")(?P<microbatch>0|[1-9]\d*)"
)


class Op(NamedTuple):
    """One unit of work. Sorts by stage, kind, microbatch; its text is as in ``2F0``."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read an op's text, strictly: nothing may follow the microbatch.

        >>> Op.parse("2F0")
        Op(stage=2, kind=<Kind.FORWARD: 'F'>, microbatch=0)

        Raises:
            ScheduleError: the text is not an op.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            kinds = ", ".join(kind.value for kind in Kind)
            raise ScheduleError(
                f"{text!r} is not an op; write stage, kind, microbatch, as in 2F0 (kinds: {kinds})"
            )
        return cls(int(match["stage"]), Kind(match["kind"]), int(match["microbatch"]))


_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_INPUT = ((0, Kind.RECV_FORWARD), (-1, _F))
_OUTPUT_GRADIENT = ((0, Kind.RECV_BACKWARD), (1, _I), (1, _B))

_NEEDS: dict[Kind, tuple[tuple[tuple[int, Kind], ...], ...]] = {
    _F: (_INPUT,),
    _B: (((0, _F),), _OUTPUT_GRADIENT),
    _I: (((0, _F),), _OUTPUT_GRADIENT),
    _W: (((0, _I),),),
    Kind.SEND_FORWARD: (((0, _F),),),
    Kind.RECV_FORWARD: (((-1, Kind.SEND_FORWARD),),),
    Kind.SEND_BACKWARD: (((0, _I), (0, _B)),),
    Kind.RECV_BACKWARD: (((1, Kind.SEND_BACKWARD),),),
    Kind.UPDATE: (((0, _W), (0, _B)),),
}
"""What each kind needs. Every need lists (stages further, kind) of the ops that can meet it."""


def dependencies(op: Op, last_stage: int, present: Container[Op]) -> tuple[Op, ...]:
    """The ops whose results ``op`` needs: the one rule that check, passes, simulator and
    interpreter ask.

    Where a result can come from several kinds (a gradient from a full backward ``B`` or from an
    input backward ``I``; a tensor from a neighbour directly or through a receive), the op that is
    ``present`` is named; if none is, the last choice is named, so that a check can say what is
    missing.

    >>> dependencies(Op(0, Kind.BACKWARD, 3), last_stage=1, present=())
    (Op(stage=0, kind=<Kind.FORWARD: 'F'>, microbatch=3), \
Op(stage=1, kind=<Kind.BACKWARD: 'B'>, microbatch=3))
    """
    found = []
    for choices in _NEEDS[op.kind]:
        ops = [Op(op.stage + offset, kind, op.microbatch) for offset, kind in choices]
        # The chain ends here: the first stage reads the batch, the last one makes its gradient.
        if op.kind in COMPUTE and not 0 <= ops[-1].stage <= last_stage:
            continue
        found.append(next((one for one in ops if one in present), ops[-1]))
    return tuple(found)
