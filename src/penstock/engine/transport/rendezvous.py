"""Where the processes of a job meet: the store that ``torch.distributed`` keeps for it
or, under ``penstock run``, the one that ranks inherit.

While ranks build something together, none can send messages to another yet. They exchange small
values here, and tell each other why they cannot come. Values are JSON, read strictly, so that
nothing that comes over the network can run code.

torch's store answers over a socket, and most of its calls wait for the answer for ever: a process
that keeps the store and is stopped would hang all others. So every call is made in a thread of its
own, which is left behind at the deadline.

An exchange, as every rank performs it; the numbers stand at the lines below:

1. Write what this rank brings under a key of its own, with which process it is.
2. Count itself among those who have come; when the count is full, all keys are there.
3. Until then look again and again (after 1 ms, and later each 0.1 s): whether a rank has written
   that it fails, whether a process that was seen in an earlier exchange is gone without having
   come, and whether the deadline has passed.
4. Delete this rank's key of the exchange before: who has come to this one has read all of that.
5. Read all keys, strictly; remember the processes of this host, for 3.

torchrun keeps one store over all attempts of a job, with what ranks wrote that are gone. So ranks
that begin an attempt first agree on a name for it, and then use only keys that begin with that:

6. Every rank but rank 0 writes a greeting, a new word each time, and waits for an answer to it.
7. Rank 0 makes up the name. While it waits for the others, in 3, it answers whatever greetings it
   sees with the name. One of an earlier attempt is answered, too, and nobody reads that.

torch's store for jobs listens on a port and asks nobody for a password, so every user of the host
could read there how ranks find each other, and write that one has failed. Under ``penstock run``
the store is a file without a name (``private_store``). Only processes of the user who owns the job,
and root, can open it.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec
import torch.distributed as dist

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.core.cluster.local import host_identity
from penstock.engine.transport.base import gone

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # the only place where mypy finds it


STORE_VARIABLE = "PENSTOCK_STORE"
"""``<process>:<descriptor>:<number of ranks>``: only the process itself is meant, not those that it
starts, which may be a job of their own."""


def empty_store() -> int:
    """A descriptor of the memory of a store, for processes that are forked from this one."""
    descriptor = os.memfd_create("penstock-store", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor


def told_to_rank(descriptor: int, num_ranks: int) -> str:
    """The words that this process, which has become a rank, finds in its environment."""
    return f"{os.getpid()}:{descriptor}:{num_ranks}"


def private_store(num_ranks: int) -> Store | None:
    """The store of this process's job, if that has as many ranks; ``None`` elsewhere than under
    ``penstock run``.

    Raises:
        RunError: it cannot be opened.
    """
    words = os.environ.get(STORE_VARIABLE, "").split(":")
    if words[0] != str(os.getpid()) or words[2] != str(num_ranks):
        return None
    path = f"/proc/self/fd/{words[1]}"
    try:
        os.stat(path)  # what cannot be opened, torch would try to open for minutes
    except OSError as error:
        raise RunError(
            f"the store of the job cannot be opened at {path} ({error.strerror}); penstock run "
            "needs /proc, and the descriptors that ranks inherit; else use torchrun"
        ) from None
    return dist.FileStore(path)  # type: ignore[attr-defined]


T = TypeVar("T")

_ANSWER_SECONDS = 10.0
"""The most that one call of the store may take where nothing is waited for, on a busy machine."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.1
_FAILURE = "failure"


class Process(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process, for others that can see it.

    Attributes:
        where: equal for processes that see each other's numbers: the host, and its namespace.
        number: the process's.
        started: when it started, in ticks of the host's clock; numbers are used again.
    """

    where: str
    number: int
    started: int

    @classmethod
    def numbered(cls, number: int) -> Process | None:
        """A process that this one sees; ``None`` where the system does not list it in ``/proc``."""
        status = _status(number)
        with suppress(OSError):
            namespace = Path("/proc/self/ns/pid").readlink()
            return cls(f"{host_identity()} {namespace}", number, status[1]) if status else None
        return None

    def is_gone(self) -> bool:
        """Whether it has ended; only for processes of the same ``where``."""
        status = _status(self.number)
        return status is None or status[0] in "ZX" or status[1] != self.started


def _status(number: int) -> tuple[str, int] | None:
    """(state, ticks when it started) of a process; ``None`` if there is none."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], int(fields[19])


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that a rank brings to an exchange, and whose it is."""

    process: Process | None
    value: msgspec.Raw


class Rendezvous:
    """One meeting of all ranks of a job, who do something together.

    Every rank must come to the same meetings for a purpose, in the same order, and in each to the
    same exchanges. A rank that gives up a meeting still has been there.

    Args:
        store: the job's, the same on all ranks.
        rank: this process's.
        num_ranks: how many processes there are.
        purpose: what they do together, for example ``"building a Pipeline"``.
        seconds: how long ranks wait for each other in each exchange.
        remedy: what to do if ranks need longer, for example ``"raise startup_seconds"``.
        anew: the store may hold what ranks of an earlier attempt have left there.

    Attributes:
        rank, num_ranks: as given.
        processes: of the ranks that this one can see and has met in an exchange.
        store: the part of the store that belongs to this attempt; without ``anew``, all of it.

    Raises:
        PeerError: the store is gone.
        DeadlineError: the store does not answer.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        purpose: str,
        seconds: float,
        remedy: str,
        *,
        anew: bool = False,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._purpose, self._remedy = purpose, remedy
        self._seconds = seconds
        self._num_exchanges = 0
        self._own = Process.numbered(os.getpid())
        self.processes: dict[int, Process] = {}
        self._silent = False
        self._store: Store = store
        self._host: _Host | None = None
        self.store: Store = self._store_of_attempt() if anew else store
        self._store = self.store
        # Counted in the store, so that nobody has to remember it here.
        number = self.ask(lambda store: store.add(f"penstock/{purpose}/{rank}", 1))
        prefix = f"penstock/{purpose}/{number}"
        self._store = dist.PrefixStore(prefix, self.store)  # type: ignore[attr-defined]

    @classmethod
    def of_group(cls, purpose: str, seconds: float, remedy: str) -> Self:
        """A meeting of all processes of torch's default group; under ``penstock run`` where nobody
        else comes, even if the group has been made in torch's store."""
        assert dist.group.WORLD is not None
        num_ranks = dist.get_world_size()
        store = private_store(num_ranks) or dist.group.WORLD.get_group_store()
        return cls(store, dist.get_rank(), num_ranks, purpose, seconds, remedy)

    def _store_of_attempt(self) -> Store:
        """The part of the store into which no earlier attempt has written."""
        word = uuid.uuid4().hex
        if self.rank == 0:
            self._host = _Host(self._store, word, self.num_ranks)
            name = word
        else:
            end = time.monotonic() + self._seconds
            name = self.ask(lambda store: self._answer_to(word, store, end), self._seconds)
        return dist.PrefixStore(f"attempt {name}", self._store)  # type: ignore[attr-defined]

    def _answer_to(self, word: str, store: Store, end: float) -> str:
        """The name of the attempt, which rank 0 tells to those that greet it."""
        store.set(_greeting(self.rank), word)  # [6]
        pause = _FIRST_PAUSE_SECONDS
        while not store.check([_answer(word)]):
            if time.monotonic() > end:
                raise DeadlineError(self._late([0], "to begin"))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return store.get(_answer(word)).decode()

    def exchange(self, value: T, kind: type[T], asked: str) -> list[T]:
        """Give a value to all ranks and take theirs.

        Args:
            value: this rank's.
            kind: its type, which ``msgspec`` can read from JSON.
            asked: what it is for, for errors: a rank did not come ``asked``, for example
                ``"to say where it runs"``.

        Returns:
            The value of every rank, in their order.

        Raises:
            PeerError: another rank has ended, or has told that it fails.
            DeadlineError: a rank did not come in time, or the store does not answer.
            RunError: a rank gave something else.
        """
        self._num_exchanges += 1
        turn, end = self._num_exchanges, time.monotonic() + self._seconds
        envelope = _Envelope(self._own, msgspec.Raw(msgspec.json.encode(value)))
        text = msgspec.json.encode(envelope).decode()
        texts = self.ask(lambda store: self._gathered(store, turn, text, asked, end), self._seconds)
        return [self._read(other, text, kind, asked) for other, text in enumerate(texts)]

    def _gathered(self, store: Store, turn: int, text: str, asked: str, end: float) -> list[bytes]:
        """The values that all ranks have brought, as soon as all have come."""
        keys = [_key(turn, rank) for rank in range(self.num_ranks)]
        store.set(keys[self.rank], text)  # [1]
        num_arrived, pause = store.add(_count(turn), 1), _FIRST_PAUSE_SECONDS  # [2]
        while num_arrived < self.num_ranks:  # [3]
            self._check_hope(store, keys, asked)
            if self._host is not None:
                self._host.answer()
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise DeadlineError(self._late(missing, asked))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            num_arrived = store.add(_count(turn), 0)
        if turn > 1:  # [4]
            store.delete_key(_key(turn - 1, self.rank))
        # [5]
        if store.has_extended_api():  # type: ignore[attr-defined]
            return store.multi_get(keys)
        return [store.get(key) for key in keys]

    def _check_hope(self, store: Store, keys: list[str], asked: str) -> None:
        """Raise unless all may still come."""
        if reason := _failure_in(store):
            raise PeerError(f"{self._where}: cancelled because {reason}", reason)
        for rank, process in self.processes.items():
            if process.is_gone() and not store.check([keys[rank]]):
                reason = gone(rank)
                raise PeerError(f"{self._where}: {reason}, before it came {asked}", reason)

    def _late(self, missing: list[int], asked: str) -> str:
        ranks = " and ".join(f"rank {rank}" for rank in missing) or "the last rank"
        return (
            f"{self._where}: {ranks} did not come {asked} within {self._seconds:g} s; see what "
            f"{'it' if len(missing) == 1 else 'they'} printed last, or {self._remedy}"
        )

    def _read(self, rank: int, text: bytes, kind: type[T], asked: str) -> T:
        try:
            process, value = msgspec.structs.astuple(msgspec.json.decode(text, type=_Envelope))
            if process and self._own and process.where == self._own.where:
                self.processes[rank] = process
            return msgspec.json.decode(value, type=kind)
        except msgspec.DecodeError as error:
            raise RunError(
                f"{self._where}: rank {rank} came {asked} with something else ({error}); run the "
                "same version of penstock everywhere"
            ) from None

    def ask(self, question: Callable[[Store], T], seconds: float = 0.0) -> T:
        """Ask the store something, and do not wait for ever.

        Args:
            question: makes calls of the store that it is given.
            seconds: how long it waits by itself, for something that it asks for again and again.

        Raises:
            PeerError: the store is gone.
            DeadlineError: it does not answer now, or has not done so before.
        """
        silence = (
            f"{self._where}: the store of the job, which torchrun or rank 0 keeps, did not answer; "
            "has that process been stopped?"
        )
        if self._silent:
            # Calls take turns, so this one would wait for the one that was left behind.
            raise DeadlineError(silence)
        try:
            return within(seconds + _ANSWER_SECONDS, lambda: question(self._store))
        except TimeoutError:
            self._silent = True
            raise DeadlineError(silence) from None
        except RunError:
            raise
        except RuntimeError as error:
            reason = "the process that kept the job's store (torchrun or rank 0) is gone"
            raise PeerError(f"{self._where}: {reason}", reason) from error

    def fail(self, reason: str) -> None:
        """Tell all who wait here, or look, that this rank will not come, and why; the first reason
        counts."""

        def tell(store: Store) -> None:
            if not store.check([_FAILURE]):
                store.set(_FAILURE, reason)

        with suppress(RunError):
            self.ask(tell)

    def failure(self) -> str:
        """The reason that a rank has given to ``fail``; empty if none has, or the store is gone."""
        try:
            return self.ask(_failure_in)
        except RunError:
            return ""

    @property
    def _where(self) -> str:
        return f"rank {self.rank}, {self._purpose}"


def _failure_in(store: Store) -> str:
    return store.get(_FAILURE).decode() if store.check([_FAILURE]) else ""


class _Host:
    """Rank 0, who tells the name of the attempt to whoever greets it.

    Args:
        store: all of it.
        name: of the attempt.
        num_ranks: how many may greet, this one included.
    """

    def __init__(self, store: Store, name: str, num_ranks: int) -> None:
        self._store = store
        self._name = name
        self._answered: dict[int, bytes] = dict.fromkeys(range(1, num_ranks), b"")

    def answer(self) -> None:
        """Answer those that have greeted since the last call."""
        for rank, before in self._answered.items():
            if self._store.check([_greeting(rank)]):
                word = self._store.get(_greeting(rank))
                if word != before:  # [7]
                    self._store.set(_answer(word.decode()), self._name)
                    self._answered[rank] = word


def _greeting(rank: int) -> str:
    return f"penstock/greeting of rank {rank}"


def _answer(word: str) -> str:
    return f"penstock/answer to {word}"


def _key(turn: int, rank: int) -> str:
    return f"{turn}/{rank}"


def _count(turn: int) -> str:
    return f"{turn}/num arrived"


def within(seconds: float, work: Callable[[], T]) -> T:
    """Do something that knows no deadline, in a thread that is left behind if it takes too long.

    Raises:
        TimeoutError: it is not done.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="penstock rendezvous", daemon=True).start()
    return outcome.result(seconds)


@contextmanager
def translated(where: str, seconds: float, remedy: str) -> Iterator[None]:
    """Turn what torch raises in something that all ranks do together into Penstock's errors.

    Args:
        where: the rank and what it does, for errors.
        seconds: how long it waits for the others.
        remedy: what to do if they need longer.

    Raises:
        DeadlineError: another rank did not answer.
        PeerError: another rank has ended.
    """
    late = f"{where}: another rank did not answer within {seconds:g} s; see its output, or {remedy}"
    try:
        yield
    except RunError:
        raise
    except TimeoutError:
        raise DeadlineError(late) from None
    except RuntimeError as error:
        if "timeout" in str(error).lower() or "timed out" in str(error).lower():
            raise DeadlineError(late) from error
        first_line = str(error).partition("\n")[0]
        raise PeerError(
            f"{where}: another rank is gone (its process ended or was killed), or cannot be "
            f"reached: {first_line}"
        ) from error
