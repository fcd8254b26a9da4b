"""The supervisor: it loads everything once, and forks the ranks from itself as often as needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from penstock.base.errors import RunError
from penstock.base.units import count_of
from penstock.training.supervisor.attempt import Account, Attempt, Rank
from penstock.training.supervisor.causes import Cause
from penstock.training.supervisor.job import Job
from penstock.training.supervisor.signals import Signals


class Result(NamedTuple):
    """What became of a job.

    Attributes:
        accounts: of each attempt, in order.
        code: the exit code for the whole.
        verdict: why it ended before all ranks ended well; empty if they did.
    """

    accounts: tuple[Account, ...]
    code: int
    verdict: str = ""


def supervise(job: Job, say: Callable[[str], None]) -> Result | Rank:
    """Run a job, and start all ranks again when one has failed.

    This returns in every rank, too, where the caller must run the job's script and then end: an
    interpreter ends as usual only if its stack is unwound.

    Args:
        say: takes what happens, one line at a time.

    Raises:
        RunError: this system has no descriptors of processes.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
        raise RunError(f"penstock run needs Linux, and this is {sys.platform}; use torchrun")
    load()
    signals = Signals()
    try:
        return _attempts(job, say, signals)
    finally:
        signals.give_back()


def _attempts(job: Job, say: Callable[[str], None], signals: Signals) -> Result | Rank:
    accounts: list[Account] = []
    causes: set[tuple[str, int | None]] = set()
    before: Cause | None = None
    for number in range(job.restarts + 1):
        attempt, supervisor = Attempt(job, number, signals), os.getpid()
        try:
            rank = attempt.start()
            if rank is not None:
                return rank
            account = attempt.wait()
        except BaseException:
            if os.getpid() == supervisor:
                attempt.kill()
            raise
        accounts.append(account)
        if account.interrupted is not None:
            code = 128 + account.interrupted
            return Result((*accounts,), code, f"ended by {account.interrupted.name}")
        if account.cause is None:
            return Result((*accounts,), 0)
        cause = account.cause
        if cause.own_fault and cause.known_as in causes:
            again = "the same error as before, so it would come again"
            return Result((*accounts,), cause.code, f"{cause}: {again}")
        causes.add(cause.known_as)
        if number < job.restarts:
            goes_on, is_lost = "all ranks start again", _is_lost(before, cause)
            if job.elastic and job.num_ranks > 1 and is_lost:
                assert cause.killed is not None
                slot, job = job.slots[cause.killed], job.without(cause.killed)
                ranks = count_of(job.num_ranks, "rank")
                goes_on = f"slot {slot} is given up, and training goes on with {ranks}"
            say(f"{cause}; {goes_on} ({number + 1} of {job.restarts})")
            before = None if is_lost else cause  # of those that are left, each begins anew
    spent = f"; {job.restarts} restarts are spent" if job.restarts else ""
    return Result((*accounts,), cause.code, f"{cause}{spent}")


def _is_lost(before: Cause | None, cause: Cause) -> bool:
    """Whether a slot is lost for good: its rank was killed from outside in two attempts, one after
    the other. Once may be bad luck, and whoever kills at random seldom hits the same rank again."""
    return before is not None and cause.killed is not None and before.killed == cause.killed


def load() -> None:
    """Load what scripts need, once here instead of once in every rank.

    Whether an accelerator is there is asked of its driver's library: torch's usual way would
    initialise it, and then it could not be used after a fork.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    import penstock.engine.tracing
    import penstock.planning.planner
    import penstock.training.pipeline
    import penstock.training.profiler  # noqa: F401

    # The first optimizer loads what takes a second.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
