"""Processes forked from the supervisor (ranks, and the keeper of their store): how they begin, the
signals that are meant for them, and why they ended.

What a program does wrong it does wrong again: an exception with the same words, an exit code, or a
signal that a fault of its own raises. A kill comes from outside, from the system that is out of
memory or from somebody who wants the machine, and a host may be unlucky twice at one step; kills
count against the number of restarts only.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, Self

import torch.distributed as dist

from penstock.engine.run.logbook import Notes

_PR_SET_PDEATHSIG = 1
_STORE_SECONDS = 300.0


@dataclass
class Forked:
    """A process that was forked from this one.

    Attributes:
        name: for people, such as ``"rank 2"``.
        number: the process's.
        ended: a descriptor that becomes readable when the process has ended.
    """

    name: str
    number: int
    ended: int

    @classmethod
    def started(cls, name: str, signals: Signals, prepare: Callable[[], None]) -> Self | None:
        """Fork.

        Args:
            signals: the supervisor's, which the fork gives back.
            prepare: makes a fork what it is to be; it ends if that raises.

        Returns:
            The process; in the fork itself ``None``.
        """
        supervisor = os.getpid()
        number = os.fork()
        if number:
            return cls(name, number, os.pidfd_open(number))
        try:
            end_with(supervisor)
            os.setsid()
            signals.give_back()
            prepare()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        return None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and to those that it has started."""
        try:
            os.killpg(self.number, number)
        except ProcessLookupError:  # it has not come to have a group of its own
            os.kill(self.number, number)

    def take_away(self) -> int:
        """The exit code of the process, which has ended; minus the number of the signal that ended
        it. If it failed, what it has started goes with it."""
        if os.waitid(os.P_PID, self.number, os.WEXITED | os.WNOWAIT).si_status:  # type: ignore[union-attr]
            # Until it is waited for, no other process or group can have its number.
            with suppress(ProcessLookupError):
                os.killpg(self.number, signal.SIGKILL)
        _, status = os.waitpid(self.number, 0)
        os.close(self.ended)
        return os.waitstatus_to_exitcode(status)


def end_with(supervisor: int) -> None:
    """Let the kernel end this process when the one that forked it has gone, however that went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it was gone before
        os._exit(1)


def door() -> socket.socket:
    """Where torch's store of an attempt will be found: it listens from now on, so that ranks may
    come before the store is there; on this host only."""
    return socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)


def keep_store(listening: socket.socket) -> None:
    """Keep torch's store of an attempt until this process is ended."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_SECONDS),
        master_listen_fd=listening.detach(),
    )
    while store:
        time.sleep(1000)


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a job from outside: Ctrl-C, ``kill``, and a terminal that is closed."""

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Signals:
    """Takes the signals that end a job, until they are given back.

    A signal that was ignored when this process was started, as by ``nohup``, stays ignored.

    Attributes:
        descriptor: becomes readable when a signal has come.
    """

    def __init__(self) -> None:
        self.descriptor, self._written = os.pipe()
        for end in (self.descriptor, self._written):
            os.set_blocking(end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        self._before: dict[signal.Signals, _Handler] = {}
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _come)

    def take(self) -> list[signal.Signals]:
        """The signals that have come since the last call, in their order."""
        try:
            numbers = os.read(self.descriptor, 64)
        except BlockingIOError:
            return []
        # SIGCHLD and others of the user's come here, too.
        return [signal.Signals(number) for number in numbers if number in self._before]

    def give_back(self) -> None:
        """Let signals do what they did before; may be called twice, and in a fork."""
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self.descriptor)
            os.close(self._written)


def _come(_number: int, _frame: FrameType | None) -> None:
    """Its number is in the pipe already."""


@contextmanager
def held_back() -> Iterator[None]:
    """Signals wait meanwhile: a fork must not get one before it is ready for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_OWN_FAULTS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS}
)

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class Ended(NamedTuple):
    """A process of an attempt that has ended by itself, or by somebody else's hand.

    Attributes:
        name: for people, such as ``"rank 2"``.
        code: its exit code, or minus the number of a signal.
        notes: what it has noted; ``None`` of one that is no rank.
        rank: its number, if it is a rank.
    """

    name: str
    code: int
    notes: Notes | None
    rank: int | None = None


@dataclass(frozen=True)
class FailureCause:
    """Why an attempt ended.

    Attributes:
        reason: who, and by what.
        step: the number of the minibatch that the rank had come to; ``None`` if to none.
        code: the exit code of a job that ends with it.
        own_fault: whether it may be expected to happen again.
        followed: whether it is only what another rank's failure has led to.
        killed: the rank that was killed from outside, if that is what happened.
    """

    reason: str
    step: int | None
    code: int
    own_fault: bool
    followed: bool = False
    killed: int | None = None

    @property
    def known_as(self) -> tuple[str, int | None]:
        """Equal for causes that are the same error at the same step."""
        return _ADDRESS.sub("0x…", self.reason), self.step

    def __str__(self) -> str:
        where = "" if self.step is None else f", at step {self.step}"
        hint = "; the machine may be out of memory" if self.code == 128 + signal.SIGKILL else ""
        return f"{self.reason}{where}{hint}"


def cause_of(ended: Ended) -> FailureCause:
    """Why one process ended, which is not with 0."""
    step = None if ended.notes is None else ended.notes.step
    failure = None if ended.notes is None else ended.notes.failure
    if ended.code < 0:
        number = -ended.code
        name = _name_of(number)
        reason = f"{ended.name} was ended by {name}"
        own_fault = number in _OWN_FAULTS
        killed = None if own_fault else ended.rank
        return FailureCause(reason, step, 128 + number, own_fault=own_fault, killed=killed)
    if failure is None:
        reason = f"{ended.name} ended with exit code {ended.code}"
        return FailureCause(reason, step, ended.code or 1, own_fault=True)
    return FailureCause(failure.reason, step, ended.code, own_fault=True, followed=failure.followed)


def first_cause(ended: Sequence[Ended]) -> FailureCause:
    """Why an attempt ended, of all processes that did not end with 0: a kill, which raises errors
    everywhere else; then what is no consequence; then what came first."""
    causes = [cause_of(process) for process in ended]
    return min(causes, key=lambda cause: (cause.followed, cause.own_fault))


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
