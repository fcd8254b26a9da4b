"""Activations that leave memory: what a microbatch keeps between its forward and its backward.

The stash of a microbatch lies idle from F to B; on the first ranks of a pipeline that is most of a
minibatch. ``add_offload`` lets it go behind the forward and brings it back before the backward, so
that only what is needed soon is in memory: Wan, Qi, Huang, Lin and Li, "PipeOffload: Improving
Scalability of Pipeline Parallelism with Memory Optimization", arXiv 2503.01328, written as ops that
are checked, simulated and run like all others.

The rules by which memory is counted; the numbers stand at the lines in ``memory``:

1. What leaves is written while the rank goes on: it keeps its room until the rank's next
   ``LEAVE_S`` or ``FETCH_S``, which waits until it is written.
2. A fetch takes the whole room at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from penstock.base.errors import ScheduleError
from penstock.core.schedule.op import BACKWARD, COMPUTE, STASHES, Kind, Op
from penstock.core.schedule.residence import leaving_stages
from penstock.core.schedule.schedule import Schedule

_WORKS = COMPUTE | {Kind.RECOMPUTE}


def add_offload(
    schedule: Schedule, stages: Collection[int] | None = None, ahead: int = 1
) -> Schedule:
    """Let what microbatches keep leave behind their forwards, and come back before their backwards.

    A microbatch whose backward comes so soon that it would have to be fetched at once stays. Apply
    this before ``add_communication``.

    Args:
        schedule: any that drains.
        stages: whose activations leave; all by default.
        ahead: how many passes of the rank before its own backward a fetch begins; 0 waits for each.

    Raises:
        InputError: a stage is not in the schedule, or ``ahead`` is no whole number ≥ 0.
        ScheduleError: a stage runs again, and so keeps nothing that could leave; or the schedule
            says already what leaves.
    """
    chosen = leaving_stages(schedule, stages, ahead, part="activations")
    if STASHES & schedule.kinds:
        raise ScheduleError("the schedule says already which activations leave; say it once")
    again = {op.stage for op in schedule.where if op.kind is Kind.RECOMPUTE} & chosen
    if again:
        raise ScheduleError(
            f"stage {min(again)} keeps only its input and runs again; let it do one of the two"
        )
    ranks = (_with_stashes(ops, chosen, ahead) for ops in schedule.ranks)
    return schedule.with_ranks(ranks)


def _with_stashes(ops: Sequence[Op], chosen: Collection[int], ahead: int) -> Iterator[Op]:
    passes = [place for place, op in enumerate(ops) if op.kind in _WORKS]
    forwards: dict[Op, int] = {}
    before: dict[int, list[Op]] = {}
    behind: dict[int, Op] = {}
    for number, place in enumerate(passes):
        op = ops[place]
        if op.stage not in chosen:
            continue
        if op.kind is Kind.FORWARD:
            forwards[op] = number
        elif op.kind in BACKWARD:
            forward = forwards[op._replace(kind=Kind.FORWARD)]
            early = number - ahead
            if early > forward + 1:
                behind[passes[forward]] = op._replace(kind=Kind.LEAVE_STASH)
                fetch = op._replace(kind=Kind.FETCH_STASH)
                before.setdefault(passes[early], []).append(fetch)
    for place, op in enumerate(ops):
        yield from before.get(place, ())
        yield op
        if place in behind:
            yield behind[place]


def check_offload(schedule: Schedule) -> None:
    """Raise ``ScheduleError`` unless all that leaves comes back before its backward, where any
    activations leave."""
    if not STASHES & schedule.kinds:
        return
    for rank, ops in enumerate(schedule.ranks):
        away: set[Op] = set()
        for op in ops:
            forward = op._replace(kind=Kind.FORWARD)
            if op.kind is Kind.LEAVE_STASH:
                away.add(forward)
            elif op.kind is Kind.FETCH_STASH:
                if forward not in away:
                    raise ScheduleError(f"rank {rank}: {op} fetches what has not left")
                away.discard(forward)
            elif op.kind in BACKWARD and forward in away:
                raise ScheduleError(
                    f"rank {rank}: {op} lacks what {forward} has kept: "
                    f"{op._replace(kind=Kind.LEAVE_STASH)} has let it go; fetch it before, as "
                    "schedule.offload.add_offload does"
                )
