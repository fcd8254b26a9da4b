"""Where the processes of a job meet, beside the channels of their ranks: to build a pipeline of
which all have the same, to compare their clocks, and to say why they failed.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from penstock.base.errors import DeadlineError, InputError, PeerError, PenstockError, RunError
from penstock.base.values import one_of
from penstock.engine.run.drive.driver import told
from penstock.engine.run.logbook import VARIABLE
from penstock.engine.transport import ProcessTransport
from penstock.engine.transport.packing import short
from penstock.engine.transport.rendezvous import Rendezvous, private_store, translated, within

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NUM_EXCHANGES = 32
"""Per host."""

ReadClock = Callable[[], float]


def clock_offsets(
    group: dist.ProcessGroup, host_ids: Sequence[Hashable], clock: ReadClock = time.perf_counter
) -> tuple[float, ...]:
    """By how many seconds each rank's clock is ahead of rank 0's, the same on every rank.

    Processes of one Linux host share the monotonic clock that records are read from; two hosts
    started theirs on different days. A rank per host plays ping-pong with rank 0, as NTP does: if
    the answer takes as long as the question, rank 0 read its clock in the middle of the exchange.
    The quickest of many exchanges leaves the least room for error: half its round trip.

    Collective: every process of the group calls it. Subtracting a rank's offset from its times
    gives them on rank 0's clock. Clocks drift by some microseconds per second, so that a long job
    asks again from time to time.

    Args:
        group: processes that exchange CPU tensors (gloo).
        host_ids: what tells the host of each rank; ranks with equal ones read the same clock, so
            that those on rank 0's host have exactly 0.
        clock: what this rank reads, in seconds.

    Returns:
        The offset of every rank, exact to half the quickest round trip to its host.
    """
    rank = dist.get_rank(group)
    speakers = {host: r for r, host in reversed(list(enumerate(host_ids)))}
    own = 0.0
    # One after the other: whoever waits for two at once answers neither at once.
    for speaker in sorted(set(speakers.values()) - {0}):
        if rank == speaker:
            own = _asked(group, clock)
        elif rank == 0:
            _answer(group, speaker, clock)
    offsets = [torch.zeros(1, dtype=torch.float64) for _ in host_ids]
    dist.all_gather(offsets, torch.tensor([own], dtype=torch.float64), group=group)
    return tuple(float(offsets[speakers[host]]) for host in host_ids)


def offsets_of_clocks(transport: ProcessTransport) -> tuple[float, ...]:
    """By how many seconds each rank's clock is ahead of rank 0's; collective.

    Raises:
        PeerError, DeadlineError: another rank has ended, or does not answer.
    """
    group = transport.group
    if group is None or len(set(transport.hosts)) == 1:
        return (0.0,) * len(transport.hosts)
    seconds, argument = transport.patience
    where = f"rank {dist.get_rank()}, comparing its clock with those of other hosts"
    with translated(where, seconds, f"raise {argument}"):
        return clock_offsets(group, transport.hosts)


def _asked(group: dist.ProcessGroup, clock: ReadClock) -> float:
    """Ask rank 0 for the time until one answer has been quick."""
    host = dist.get_global_rank(group, 0)
    answer = torch.zeros(2, dtype=torch.float64)
    exchanges: list[tuple[float, float]] = []
    for _ in range(NUM_EXCHANGES):
        sent = clock()
        dist.send(_PING, host, group=group)
        dist.recv(answer, host, group=group)
        back = clock()
        heard, answered = answer.tolist()
        round_trip = (back - sent) - (answered - heard)
        exchanges.append((round_trip, (sent + back) / 2 - (heard + answered) / 2))
    return min(exchanges)[1]


def _answer(group: dist.ProcessGroup, asker: int, clock: ReadClock) -> None:
    host = dist.get_global_rank(group, asker)
    ping = torch.zeros_like(_PING)
    for _ in range(NUM_EXCHANGES):
        dist.recv(ping, host, group=group)
        heard = clock()
        dist.send(_times(heard, clock()), host, group=group)


def _times(*times: float) -> Tensor:
    return torch.tensor(times, dtype=torch.float64)


_PING = torch.zeros(1)


_HEARSAY_SECONDS = 0.5
_LOOK_AGAIN_SECONDS = 0.01


class Board:
    """Where ranks write why they failed, beside the channels.

    gloo ends all connections of a rank whose wait runs out, so that its neighbours hear nothing but
    that it is gone; and of ranks that wait for each other in a row, all run out at once.

    Args:
        meeting: where all ranks have built the pipeline.
    """

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting = meeting
        self._others = [rank for rank in range(meeting.num_ranks) if rank != meeting.rank]

    def write(self, notice: str) -> None:
        """Tell those who will look."""
        key, text = _key(self._meeting.rank), short(notice).decode()
        with suppress(RunError):  # the store may be gone with the rank that kept it
            self._meeting.ask(lambda store: store.set(key, text))

    def explained(self, error: PeerError | DeadlineError) -> PeerError | DeadlineError:
        """The error, with what other ranks have said about the cause, if it was not known."""
        heard = self._hear()
        own = f"rank {self._meeting.rank} failed"  # as others have heard from this rank
        news = {
            notice
            for notice in heard.values()
            if notice not in told(error) and not notice.startswith(own)
        }
        if isinstance(error, DeadlineError):
            silent = [str(other) for other in self._others if other not in heard]
            news |= {f"nothing was heard of rank {' and '.join(silent)}"} if silent else set()
        if not news:
            return error
        message = f"{error}; meanwhile {', '.join(sorted(news))}"
        if isinstance(error, PeerError):
            return PeerError(message, error.reason)
        return DeadlineError(message)

    def _hear(self) -> dict[int, str]:
        """Notices of others, by rank; some write only now."""
        heard: dict[int, str] = {}
        with suppress(RunError):
            self._meeting.ask(partial(self._look, heard), _HEARSAY_SECONDS)
        return dict(heard)

    def _look(self, heard: dict[int, str], store: Store) -> None:
        end = time.monotonic() + _HEARSAY_SECONDS
        while len(heard) < len(self._others) and time.monotonic() < end:
            for other in self._others:
                if other not in heard and store.check([_key(other)]):
                    heard[other] = store.get(_key(other)).decode()
            time.sleep(_LOOK_AGAIN_SECONDS)


def _key(rank: int) -> str:
    return f"why rank {rank} failed"


TransportName = Literal["auto", "threads", "shared-memory", "process-group"]

PURPOSE = "building a Pipeline"
REMEDY = "raise startup_seconds"


def several_processes() -> bool:
    """Whether this process is one of several of a job."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def joined(transport: TransportName, seconds: float, num_ranks: int) -> Iterator[Rendezvous | None]:
    """Where this process meets the others while a pipeline is built; ``None`` where ranks will be
    threads of this process.

    What is raised meanwhile is told to the others, so that they need not wait.

    Args:
        seconds: how long ranks wait for each other, each time.
        num_ranks: how many ranks the plan has, for advice.

    Raises:
        InputError: there is no such transport, or this is not a process of a job.
        DeadlineError, PeerError: the others did not come.
    """
    one_of("transport", transport, get_args(TransportName))
    if transport == "threads" or (transport == "auto" and not several_processes()):
        yield None
        return
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise InputError(
                f"transport={transport!r} needs one process per rank: start the script with "
                f"torchrun --nproc-per-node={num_ranks}, or use transport='threads'"
            )
        _make_default_group(seconds)
    meeting = Rendezvous.of_group(PURPOSE, seconds, REMEDY)
    with _telling_failures(meeting, PURPOSE):
        yield meeting


@contextmanager
def _telling_failures(meeting: Rendezvous, doing: str) -> Iterator[None]:
    try:
        yield
    except PeerError:
        raise  # the others know
    except BaseException as error:
        kind = "" if isinstance(error, PenstockError) else f"{type(error).__name__}: "
        who = "" if isinstance(error, RunError) else f"rank {meeting.rank} failed {doing}: "
        meeting.fail(f"{who}{kind}{told(error)}")
        raise


def _make_default_group(seconds: float) -> None:
    """torch's default group, which the script has not made; whoever does not come is named."""
    store, rank, num_ranks = _store_of_job(seconds)
    doing = "making the process group"
    meeting = Rendezvous(store, rank, num_ranks, doing, seconds, REMEDY, anew=_outlives_attempts())
    with _telling_failures(meeting, doing):
        meeting.exchange(None, NoneType, "to its Pipeline")
        with translated(f"rank {rank}, {doing}", seconds, REMEDY):
            within(
                seconds,
                lambda: dist.init_process_group(
                    "gloo", store=meeting.store, rank=rank, world_size=num_ranks
                ),
            )
    # It stays for the next pipeline: made anew, it would find the addresses of the old one in
    # torchrun's store.
    atexit.register(_leave_group)


def _store_of_job(seconds: float) -> tuple[Store, int, int]:
    """(store, rank, number of ranks) as penstock run, torchrun, or who started the processes,
    says."""
    private = private_store(int(os.environ["WORLD_SIZE"])) if "WORLD_SIZE" in os.environ else None
    if private is not None:
        return private, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    late = (
        f"rank {os.environ['RANK']} did not meet the others at {where} (MASTER_ADDR, MASTER_PORT) "
        f"within {seconds:g} s; see what they printed last, or {REMEDY}"
    )
    try:
        # Twice as long: torch gives up by itself, unless whoever keeps the store is stopped.
        place: tuple[Store, int, int] = within(
            2 * seconds, lambda: next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
        )
    except TimeoutError:
        raise DeadlineError(late) from None
    except ValueError as error:  # an environment variable is missing
        raise InputError(f"{error}; start the script with torchrun") from None
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]  # says how many came, if this is rank 0
        raise DeadlineError(f"{late} ({first_line})") from error
    return place


def _outlives_attempts() -> bool:
    """Whether the job's store may hold what ranks have left there that are gone: torchrun keeps it
    when it starts them again, and gloo would find their addresses."""
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) and VARIABLE not in os.environ
    )


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
