"""A link between the accelerators of two processes: tensors go straight from one to the other.

What carries them is the collective library that torch has for the kind of device; no line here
names one. Such a library has three habits:

- Its sends are rendezvous: one is over when the other rank has posted its receive. They occupy a
  stream of the library's own, so nobody waits for that but what needs the outcome. The library may
  wait for the current stream when something is posted, and ``work.wait()`` makes the current
  stream wait for it.
- All that is posted to a communicator passes in order. Two ranks that send to each other would wait
  for each other for ever. So each direction between two ranks has a group of its own, and with
  it a communicator of its own, however torch shares communicators within a group.
- A receive must know the size, and takes whatever was sent next.
- Some do not tell whether something is over before it was waited for.

So a message's small part goes ahead by the transport of main memory. It tells shapes, and where the
tensors stand in the order of the link. Receives are posted in that order, which need not be the
order in which the receiver's program asks: when it asks for a message, those that were sent before
are looked up and posted first. The small part tells which message was the one before, and it has
arrived, or soon will, since nothing keeps small parts from being sent. Hence no program can
deadlock a link, whatever its order, and also messages that no schedule knows of (sums of shared
weights, norms, skips) may use it. A program whose receives keep the order of the sends, as
``schedule.check(…, capacity=0)`` proves, is spared memory for messages that come early; nothing
else.

How long memory is kept, and who may write to it:

1. What is sent is kept until the library says that it has left, or until something comes from the
   other rank that was made after that rank had taken it up (the small part tells how far it has
   got). All ops that follow are then ordered behind the send, which costs nothing, since it is
   over; so they may overwrite what was sent. Where nothing comes for long, as in evaluations, the
   oldest of many sends is let go: a stream that computes nothing waits for it, and the allocator
   for that stream.
2. Memory of a receive is allocated on the stream of arrivals, on which no compute is, so that a
   receive does not wait for the ops before it. It is used by the compute stream.

Bytes travel as ``uint8``, since not every library knows every dtype; what has gaps is copied first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.device.queue import AcceleratorQueue
from penstock.engine.model import tree
from penstock.engine.transport import groups, packing
from penstock.engine.transport.base import Edge
from penstock.engine.transport.wire import is_dense

_NONE = -1
_MOST_KEPT = 64

Form = tuple[int, ...] | None
"""Of a tensor that travels on the link its strides, empty where its dimensions lie in their order;
``None`` of a leaf that is in the small part."""


class _Before(NamedTuple):
    """Which message was sent before; both are -1 of the first."""

    tag: int
    number: int


class _LinkPosition(NamedTuple):
    """Where a message stands on a link.

    Attributes:
        turn: it is the n-th that takes tensors over the link; -1 if it takes none.
        before: the one of the turn before.
        num_taken: how many messages of the other direction its sender had taken up before.
    """

    turn: int
    before: _Before
    num_taken: int

    def as_tensor(self) -> Tensor:
        """As it travels: numbers that differ with every message, in a layout that does not."""
        return torch.tensor([self.turn, *self.before, self.num_taken])

    @classmethod
    def read(cls, numbers: Tensor) -> _LinkPosition:
        """Undo ``as_tensor``."""
        turn, tag, number, num_taken = numbers.tolist()
        return cls(turn, _Before(tag, number), num_taken)


class LinkMessage(NamedTuple):
    """A message to be sent.

    Attributes:
        small_part: what the transport of main memory carries.
        place: where it stands on the link.
        tensors: what goes over the link.
    """

    small_part: Any
    place: _LinkPosition
    tensors: Sequence[Tensor]


class _Leaving(NamedTuple):
    """Tensors on their way to the other rank, which keeps them alive."""

    turn: int
    works: Sequence[dist.Work]
    tensors: Sequence[Tensor]


class _Arriving(NamedTuple):
    """A message whose receives are posted."""

    value: Any
    place: _LinkPosition
    works: Sequence[dist.Work]
    tensors: Sequence[Tensor]


class DeviceLink:
    """One rank's end of the link to one other rank.

    Args:
        queue: this rank's work on its device.
        outgoing: a process group of the two ranks, for what this one sends and nothing else.
        incoming: another one, for what it receives.
    """

    def __init__(
        self, queue: AcceleratorQueue, outgoing: dist.ProcessGroup, incoming: dist.ProcessGroup
    ) -> None:
        self._queue = queue
        self._outgoing, self._incoming = outgoing, incoming
        self._other = 1 - dist.get_rank(outgoing)
        self._closed = False
        self._num_sent = self._num_posted = self._num_taken = 0
        self._last_sent = _Before(_NONE, _NONE)
        self._leaving: deque[_Leaving] = deque()
        self._let_go: Sequence[dist.Work] = ()
        self._early: dict[tuple[Edge, int], _Arriving] = {}
        self._unwanted: list[_Arriving] = []
        for group in (outgoing, incoming):
            groups.lend(group, self)

    def describe(self, edge: Edge, number: int, value: Any) -> LinkMessage:
        """A message, which takes the next place on the link if it has tensors for it."""
        leaves, structure = tree.flatten(value)
        forms: list[Form] = [None] * len(leaves)
        tensors = []
        for index, leaf in enumerate(leaves):
            if is_dense_on(self._queue.device, leaf):
                tensor, forms[index] = _without_gaps(leaf)
                leaves[index] = _sketch(tensor).requires_grad_(leaf.requires_grad)
                if tensor.numel():
                    tensors.append(tensor)
        place = _LinkPosition(_NONE, self._last_sent, self._num_taken)
        if tensors:
            place = place._replace(turn=self._num_sent)
            self._num_sent += 1
            self._last_sent = _Before(edge.tag, number)
        small_part = tree.unflatten(leaves, structure), tuple(forms), place.as_tensor()
        return LinkMessage(small_part, place, tensors)

    def post(self, message: LinkMessage) -> None:
        """Let the tensors of a message go."""
        while self._leaving and all(work.is_completed() for work in self._leaving[0].works):
            self._leaving.popleft()
        if not message.tensors:
            return
        if len(self._leaving) >= _MOST_KEPT:
            _, works, tensors = self._leaving.popleft()
            self._queue.keep_until(lambda: [work.wait() for work in works], tensors)
            self._let_go = works  # all before it were over before
        with self._queue.sending():
            works = [
                _under_way(dist.isend(_bytes(tensor), group=self._outgoing, group_dst=self._other))
                for tensor in message.tensors
            ]
        self._leaving.append(_Leaving(message.place.turn, works, message.tensors))

    def receive(self, edge: Edge, number: int, hear: Callable[[Edge, int], Any]) -> Any:
        """A message that the program asks for; the compute stream waits for its tensors.

        Args:
            edge: from whom.
            number: the message's.
            hear: gives the small part of a message, when it has come.
        """
        wanted = (edge, number)
        if wanted not in self._early:
            self._post_all_up_to(edge, number, hear)
        return self._taken_up(self._early.pop(wanted))

    def _post_all_up_to(self, edge: Edge, number: int, hear: Callable[[Edge, int], Any]) -> None:
        """Post the receives of a message, after those of messages that were sent before it."""
        heard = []
        key = (edge, number)
        while True:
            message = hear(*key)
            if not _is_small_part(
                message
            ):  # what is sent below this transport, such as a call's seal
                self._early[key] = _Arriving(
                    message, _LinkPosition(_NONE, self._last_sent, 0), (), ()
                )
                return
            value, forms, place = message[0], message[1], _LinkPosition.read(message[2])
            heard.append((key, value, forms, place))
            if place.turn <= self._num_posted:
                break
            key = (edge._replace(tag=place.before.tag), place.before.number)
        for key, value, forms, place in reversed(heard):
            self._early[key] = self._posted(key[0], value, forms, place)

    def _posted(
        self, edge: Edge, value: Any, forms: Sequence[Form], place: _LinkPosition
    ) -> _Arriving:
        leaves, structure = tree.flatten(value)
        if len(forms) != len(leaves):
            packing.refuse(edge, f"it has {len(leaves)} parts, but tells of {len(forms)}")
        tensors, works = [], []
        with self._queue.arriving():
            for index, (leaf, form) in enumerate(zip(leaves, forms, strict=True)):
                if form is None:
                    continue
                tensor = leaves[index] = self._room_for(edge, leaf, form)
                tensors.append(tensor)
                if tensor.numel():
                    work = dist.irecv(_bytes(tensor), group=self._incoming, group_src=self._other)
                    works.append(_under_way(work))
                tensor.requires_grad_(leaf.requires_grad)
        for index, (leaf, form) in enumerate(zip(leaves, forms, strict=True)):
            if form is None and isinstance(leaf, Tensor):  # it was in main memory over there
                leaves[index] = tree.apart(leaf, self._queue.from_host)
        if place.turn != _NONE:
            self._num_posted = place.turn + 1
        return _Arriving(tree.unflatten(leaves, structure), place, works, tensors)

    def _room_for(self, edge: Edge, sketch: Any, strides: tuple[int, ...]) -> Tensor:
        if not isinstance(sketch, Tensor) or sketch.numel() or not sketch.dim():
            packing.refuse(edge, "it tells strides of what is no tensor")
        shape, device = sketch.shape[1:], self._queue.device
        if not strides:
            return torch.empty(shape, dtype=sketch.dtype, device=device)
        if len(strides) != len(shape) or not is_dense(shape, strides):
            packing.refuse(edge, f"strides {strides} do not fit shape {tuple(shape)}")
        return torch.empty_strided(shape, strides, dtype=sketch.dtype, device=device)

    def _taken_up(self, arriving: _Arriving) -> Any:
        value, place, works, tensors = arriving
        if works:
            over = []
            while self._leaving and self._leaving[0].turn < place.num_taken:
                over.append(self._leaving.popleft())  # [1], which keeps them until they are joined
            left = [*self._let_go, *(work for leaving in over for work in leaving.works)]
            self._let_go = ()
            self._queue.join(lambda: [work.wait() for work in [*works, *left]], tensors)  # [2]
            self._num_taken = max(self._num_taken, place.turn + 1)
        return value

    def discard(self, before: int) -> None:
        """Forget messages whose number is lower, and keep their memory, which will be written."""
        for key in [key for key in self._early if key[1] < before]:
            self._unwanted.append(self._early.pop(key))

    def abort(self) -> None:
        """Give up what is under way: the other rank may never post its part, and whoever waits for
        this device would wait for that."""
        for group in (self._outgoing, self._incoming):
            with suppress(Exception):  # not every library can, and another error is on its way
                group.abort()

    def close(self) -> None:
        """Leave for good. What was posted may still be under way for the other rank."""
        self._closed = True

    @property
    def closed(self) -> bool:
        """Whether nothing will be sent or received any more."""
        return self._closed

    def release(self) -> None:
        """Let go of what was under way in groups that have been destroyed."""
        self._leaving.clear()
        self._let_go = ()
        self._early.clear()
        self._unwanted.clear()


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None  # only a process outside of the group gets none
    return work


def is_dense_on(device: torch.device, leaf: Any) -> bool:
    """Whether a part of a value is a tensor on a device, whose numbers are all there as bytes."""
    return (
        isinstance(leaf, Tensor)
        and leaf.device == device
        and leaf.layout is torch.strided
        and not leaf.is_nested
    )


def _is_small_part(message: Any) -> bool:
    return type(message) is tuple and len(message) == 3 and isinstance(message[2], Tensor)


def _sketch(tensor: Tensor) -> Tensor:
    """Tells a tensor's shape and dtype, and takes no bytes."""
    return torch.empty((0, *tensor.shape), dtype=tensor.dtype)


def _without_gaps(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor whose numbers lie side by side, in the same order if they do already; and its
    strides if that is another order than that of its dimensions."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor, ()
    if is_dense(tensor.shape, tensor.stride()):
        return tensor, tensor.stride()
    return tensor.contiguous(), ()


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor without gaps, in the order in which they lie."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
