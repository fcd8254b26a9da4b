"""torch's process groups between the ranks of pipelines: one each, and two more per pair of linked
accelerators, destroyed when all are done.

A group keeps threads, sockets and connections until it is destroyed. That cannot be when a pipeline
is closed: other ranks may still be waiting for what this one sent last, and a connection that ends
takes with it what was not read. When a rank has come to build the next pipeline, however, it waits
for nothing of those it has closed or dropped; so when all have come, their groups go. Another group
is made for every pipeline, for the messages of an old one must never be taken for those of the
next, and one whose wait has run out is broken. Of a pipeline that has failed, those in which
something may be under way stay until the process ends (``give_up``).
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from penstock.base.errors import DeadlineError, PeerError
from penstock.engine.transport.base import Transport, gone
from penstock.engine.transport.rendezvous import Process, translated, within


class User(Protocol):
    """Whoever sends messages through a group."""

    @property
    def closed(self) -> bool:
        """Whether it will use the group no more."""

    def release(self) -> None:
        """Let go of a group that has been destroyed."""


class _Lent(NamedTuple):
    group: dist.ProcessGroup
    user: weakref.ref[User]


# torch lists all groups of this process and keeps them alive; this names those that are ours. It
# goes with the default group, with which torch destroys all others.
_LENT: WeakKeyDictionary[dist.ProcessGroup, list[_Lent]] = WeakKeyDictionary()

_SEEN: WeakKeyDictionary[dist.ProcessGroup, dict[int, Process]] = WeakKeyDictionary()
"""The processes of ranks that this one can see."""

_ENDING_SECONDS = 0.5
_LOOK_AGAIN_SECONDS = 0.01
_LISTEN_AGAIN_SECONDS = 0.25


def make_group(seconds: float) -> dist.ProcessGroup:
    """A gloo group of all processes of the job; every one must call it, at about the same time.

    Args:
        seconds: how long to wait for the others, and, unless told otherwise, for a message.

    Raises:
        DeadlineError: another rank did not come, or did not answer.
        PeerError: another rank ended meanwhile.
    """
    where = f"rank {dist.get_rank()}, connecting to all other ranks"
    with translated(where, seconds, "raise startup_seconds"):
        # Half as long again: torch gives up by itself, unless the store that it asks is silent.
        return within(1.5 * seconds, lambda: new_group(seconds, "gloo"))


def new_group(
    seconds: float, backend: str, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """A group; every process of the job must make the same ones in the same order.

    Args:
        seconds: how long to wait for the others, and, unless told otherwise, for a message.
        backend: the library that carries its messages.
        ranks: those that are in it; by default all. What the others get is of no use.
    """
    group: dist.ProcessGroup = dist.new_group(
        ranks and [*ranks], timeout=timedelta(seconds=seconds), backend=backend
    )
    return group


def make_groups(seconds: float, parts: Sequence[Sequence[int]]) -> list[dist.ProcessGroup]:
    """A gloo group for each of some sets of ranks; every process of the job must call it.

    Args:
        seconds: how long to wait for the others, and, unless told otherwise, for a message.
        parts: the ranks of each group, alike on all processes.

    Raises:
        DeadlineError: another rank did not come, or did not answer.
        PeerError: another rank ended meanwhile.
    """
    where = f"rank {dist.get_rank()}, connecting to ranks that hold the same weights"
    with translated(where, seconds, "raise startup_seconds"):
        return within(1.5 * seconds, lambda: [new_group(seconds, "gloo", ranks) for ranks in parts])


def remember(processes: Mapping[int, Process]) -> None:
    """Note the processes of ranks that this one can see, so that who is gone can be named."""
    assert dist.group.WORLD is not None
    _SEEN[dist.group.WORLD] = dict(processes)


def lost(waiting: str, others: Sequence[int], transport: Transport) -> PeerError:
    """The error of a group of which a rank is gone: one that has failed, as it has said; else the
    one whose process has ended, or any of the others where that cannot be seen, as on another host.

    Args:
        waiting: who waits for what.
        others: the other ranks.
        transport: hears of failures.
    """
    failure, ended = transport.failure_heard(), list[int]()
    if not failure:
        ended = _ended(others)
        # Again: a rank that fails leaves its groups just before it says why.
        failure = "" if ended else transport.failure_heard()
    if failure:
        return _cancelled(waiting, failure)
    reason = gone(" and ".join(map(str, ended)) or _any_of(others))
    return PeerError(f"{waiting}: {reason}", reason)


def _cancelled(waiting: str, failure: str) -> PeerError:
    return PeerError(f"{waiting}: cancelled because {failure}", failure)


def _ended(others: Sequence[int]) -> list[int]:
    """Those whose processes have ended. The connections of a process end just before it does."""
    seen = _SEEN.get(dist.group.WORLD, {}) if dist.group.WORLD is not None else {}
    processes = {rank: seen[rank] for rank in others if rank in seen}
    end = time.monotonic() + _ENDING_SECONDS
    while processes:
        ended = [rank for rank, process in processes.items() if process.is_gone()]
        if ended or time.monotonic() > end:
            return ended
        time.sleep(_LOOK_AGAIN_SECONDS)
    return []


def _any_of(others: Sequence[int]) -> str:
    return " or ".join(map(str, others))


def wait(work: dist.Work, transport: Transport, others: Sequence[int], waiting: str) -> None:
    """Wait until what was asked of a group is done, or a rank says that it has failed: its
    connections stay for as long as its process keeps the pipeline.

    Args:
        work: a collective's; a message's would end its connection with the first wait in vain.
        transport: hears of failures, and knows how long to wait.
        others, waiting: as for ``lost``.

    Raises:
        PeerError, DeadlineError: a rank is gone, has failed, or does not answer.
    """
    patience = transport.patience
    end = time.monotonic() + patience.seconds
    while True:
        # Asked before the wait: what a wait for something that is over raises is its outcome.
        is_over, left = work.is_completed(), end - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(min(left, _LISTEN_AGAIN_SECONDS), 0.001)))
            return
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise lost(waiting, others, transport) from error
            if is_over or left <= 0:
                raise DeadlineError(
                    f"{waiting}: rank {_any_of(others)} did not answer within {patience.seconds:g} "
                    f"s; see what they printed last, or raise {patience.argument}"
                ) from error
            if failure := transport.failure_heard():
                raise _cancelled(waiting, failure) from error


def lend(group: dist.ProcessGroup, user: User) -> None:
    """Note who uses a group; when nobody does any more, ``destroy_unused`` ends it."""
    assert dist.group.WORLD is not None
    _LENT.setdefault(dist.group.WORLD, []).append(_Lent(group, weakref.ref(user)))


def give_up(group: dist.ProcessGroup) -> None:
    """Leave a group for good in which something may be under way that nobody answers any more."""
    assert dist.group.WORLD is not None
    lent = _LENT.get(dist.group.WORLD, [])
    lent[:] = [own for own in lent if own.group is not group]
    # Whoever lets go of it last would wait for what is under way until all others have let go, too,
    # or for its deadline; so it stays for as long as the process, and its threads and connections.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    dist.destroy_process_group(group)


def destroy_unused() -> None:
    """End the groups that this rank has closed or dropped. Only when every rank has come to build
    another pipeline."""
    assert dist.group.WORLD is not None
    lent = _LENT.pop(dist.group.WORLD, [])
    for group, reference in lent:
        user = reference()
        if user is not None and not user.closed:
            lend(group, user)
            continue
        dist.destroy_process_group(group)
        if user is not None:
            user.release()
