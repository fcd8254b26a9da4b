"""Training many models at once on fewer devices: SHARP of Hydra (arXiv 2110.08633), with threads.

Every job is a ``Pipeline`` of one rank with a thread of its own, whose worker stands still between
two visits until a device is free for it. ``dispatcher`` gives devices to jobs, by the policies of
``turns/``, and has the next visit's stage fetched meanwhile; ``trainee`` feeds one job, visit by
visit and from decision to decision, and its ``Referee`` decides who goes on; ``results``
is what comes out, and the table that shows it while it runs. ``fleet`` is the façade.

Decisions:

- A device is a permission to compute, not a thread: whoever has it runs in the thread of its own
  job. So a job's steps, errors, random streams and bits are those of training it alone, and the
  engine's only part is ``Worker.pace``, which hands out steps.
- Fetches that a plan puts in front of a visit for the one behind it are held back, unless the
  dispatcher guesses that the job goes on at once; a job that waits makes up for them when the
  dispatcher guesses that it is next. So weights are in memory for visits that are under way and,
  for each device, one that is to come; beside what plans keep (the first stage, activations). A job
  that waits hands its free buffers on (``weights.buffers.SpareBuffers``).
- A job that fails gives its device back where it fails; nobody else hears of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.training.fleet.fleet import Fleet
    from penstock.training.fleet.job import Job
    from penstock.training.fleet.results import FleetResults, JobResult
else:
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.training.fleet.fleet": ("Fleet",),
            "penstock.training.fleet.job": ("Job",),
            "penstock.training.fleet.results": ("FleetResults", "JobResult"),
        },
    )

__all__ = ["Fleet", "FleetResults", "Job", "JobResult"]
