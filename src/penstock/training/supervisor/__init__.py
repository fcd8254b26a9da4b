"""``penstock run``: the ranks of one host, and again when one of them dies.

A process that has loaded torch forks the ranks, so that all of them are there again milliseconds
after a death; a fresh interpreter would load torch for seconds. Scripts load their newest
checkpoint themselves, as under torchrun, whose place this takes on one host only: several hosts
always go through torchrun.

``job`` is what is asked for, with the script that ranks run. ``processes`` forks one of them, takes
signals from outside and says why a process ended; ``supervising`` is an attempt of all ranks, and
whether there is another one.

Decisions:

- Ranks meet in memory that they inherit, new for each attempt, since nothing may be left in it of
  ranks that are gone. Nobody else can open it: a store that listens would be every user's.
- A script may make torch's process group itself, in the store that torch keeps. The supervisor
  never has a thread, for only then can it be forked safely, so that store has a process of its own,
  the keeper. Its socket listens before anybody is forked: ranks and keeper can come in any order,
  no port is looked for twice, and nobody off this host can connect.
- Deaths are read from descriptors of processes (pidfd), exit codes by waiting for each. Nothing is
  ever ended by a number that could belong to another process meanwhile: a rank keeps its number
  until it is waited for.
- Ranks have sessions of their own. Ctrl-C reaches the supervisor only, which passes it on, so that
  every rank gets it once. If the supervisor is killed, the kernel kills the ranks.
- At which step a rank was, and why its script ended, stands in memory that outlives it
  (``run.logbook``). The same error at the same step, twice, ends the job; a kill is no error.
"""

from penstock.training.supervisor.job import Script, SupervisedJob
from penstock.training.supervisor.processes import FailureCause
from penstock.training.supervisor.supervising import (
    AttemptMoments,
    AttemptRecord,
    Rank,
    SupervisionResult,
    supervise,
)

__all__ = [
    "AttemptMoments",
    "AttemptRecord",
    "FailureCause",
    "Rank",
    "Script",
    "SupervisedJob",
    "SupervisionResult",
    "supervise",
]
