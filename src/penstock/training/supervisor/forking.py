"""Processes forked from the supervisor: the ranks of an attempt, and the keeper of its store."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch.distributed as dist

from penstock.training.supervisor.signals import Signals

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
