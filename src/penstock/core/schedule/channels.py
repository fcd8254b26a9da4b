"""Channels between ranks: what travels where."""

from __future__ import annotations

from penstock.base.errors import InputError
from penstock.base.values import is_whole
from penstock.core.schedule.op import NEEDS, Kind, Op

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
