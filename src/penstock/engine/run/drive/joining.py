"""How a process joins the others of its job to build a pipeline, and tells them if it fails to."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import NoneType
from typing import TYPE_CHECKING, Literal, get_args

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.base.errors import DeadlineError, InputError, PeerError, PenstockError, RunError
from penstock.base.values import one_of
from penstock.engine.run.drive.driver import told
from penstock.engine.run.logbook import VARIABLE
from penstock.engine.transport.rendezvous import Rendezvous, private_store, translated, within

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

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
