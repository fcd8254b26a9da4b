"""Whose turn it is: the visits of a job, between which its device may go to another job, the
policies by which a free device takes one, and the bound that no order of turns could undercut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from penstock.base.errors import InputError
from penstock.base.values import expect, shown
from penstock.core.schedule import Kind, Op
from penstock.core.schedule.lower import add_update
from penstock.core.schedule.op import FETCHES, LEAVES
from penstock.core.schedule.residence import NEED_WEIGHTS, StageResidency, stays_of
from penstock.core.timing.costs import Costs
from penstock.planning.plans.spilling import with_residence

if TYPE_CHECKING:
    from penstock.planning.plans import Plan

PolicyName = Literal["longest", "fair", "whole"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True)
class Standing:
    """Where a job stands that waits for a device.

    Attributes:
        number: of the job; the lower one wins where all else is equal.
        left: seconds of compute until the next decision about it, or its end.
        share: how much of the work until then is done, from 0 to 1.
        home: the device that began it, if it stays there.
        only: the device on which alone it can compute, if there is one.
    """

    number: int
    left: float
    share: float = 0.0
    home: int | None = None
    only: int | None = None


def choose(
    policy: PolicyName, device: int, waiting: Sequence[Standing], owned: Collection[int] = ()
) -> Standing | None:
    """The job that a free device takes, or ``None`` if it rather waits.

    Args:
        policy: ``"longest"`` takes the job with the longest remaining time (Hydra's Sharded-LRTF);
            ``"fair"`` the one of whose work the smallest share is done; ``"whole"`` stays with a
            job until its end, and then takes the longest that nobody has begun.
        device: its number.
        waiting: jobs that could go on now.
        owned: the devices that have begun a job which has not ended, for ``"whole"``.

    >>> waiting = [Standing(0, left=3.0, share=0.1), Standing(1, left=5.0, share=0.5)]
    >>> choose("longest", 0, waiting).number, choose("fair", 0, waiting).number
    (1, 0)
    """
    waiting = [job for job in waiting if job.only in (None, device)]
    if policy == "fair":
        return min(waiting, key=lambda job: (job.share, -job.left, job.number), default=None)
    if policy == "whole":
        own = [job for job in waiting if job.home == device]
        if own or device in owned:
            return own[0] if own else None
        waiting = [job for job in waiting if job.home is None]
    return max(waiting, key=lambda job: (job.left, -job.number), default=None)


def guess(
    policy: PolicyName,
    device: int,
    waiting: Sequence[Standing],
    fetched: Collection[int],
    num_devices: int,
    owned: Collection[int] = (),
) -> Standing | None:
    """The job whose stage is to be fetched for a device while that is still busy; ``None`` where
    the stage that comes next is most likely in memory, or enough others are.

    Args:
        waiting: jobs that wait, and the one that has the device, as it will stand then.
        fetched: numbers of those that wait with their stage in memory: one for each other device,
            the others are for this one.
        num_devices: as many jobs may wait so.
    """
    if len(fetched) >= num_devices:
        return None
    left = list(waiting)
    for _ in range(num_devices):
        chosen = choose(policy, device, left, owned)
        if chosen is None or chosen.number not in fetched:
            return chosen
        left.remove(chosen)
    return None


class Bound(NamedTuple):
    """Seconds that a fleet takes at least, by reason.

    Attributes:
        devices: all work, shared evenly.
        job: the longest job, whose visits come one after another.
        reading: the tier that is to read for longest, one stage at a time.
        unit: the longest visit, which ``longest`` may lie above the others' bound at most where
            all fetches are hidden.
    """

    devices: float
    job: float
    reading: float
    unit: float

    @property
    def seconds(self) -> float:
        """The largest."""
        return max(self.devices, self.job, self.reading)

    @property
    def reason(self) -> str:
        """Which one that is, in words."""
        if self.seconds == self.devices:
            return "all work over all devices"
        return "the longest job" if self.seconds == self.job else "what the tier must read"


def bound(
    job_seconds: Sequence[float],
    num_devices: int,
    unit: float = 0.0,
    reading: Mapping[str, float] | None = None,
) -> Bound:
    """The bound of jobs that compute for so many seconds each.

    Args:
        unit: seconds of the longest visit.
        reading: by tier, seconds of everything that is read from it.

    >>> bound([4.0, 4.0, 4.0], 2).seconds
    6.0
    """
    return Bound(
        sum(job_seconds) / num_devices,
        max(job_seconds, default=0.0),
        max((reading or {}).values(), default=0.0),
        unit,
    )


class StageVisit(NamedTuple):
    """All that a rank does to one stage before it goes on to another.

    Attributes:
        stage: its number.
        backward: whether backwards run.
        seconds: how long it computes.
        fetch_seconds: to bring the stage's weights in, before it can begin.
        state_seconds: to bring in what the update needs, before it can end.
        leave_seconds: to write what has changed, behind its end.
    """

    stage: int
    backward: bool = False
    seconds: float = 1.0
    fetch_seconds: float = 0.0
    state_seconds: float = 0.0
    leave_seconds: float = 0.0


def beginnings(ops: Sequence[Op]) -> list[int]:
    """Where the visits of a rank begin, as places among its ops.

    A visit takes along the fetches in front of it, which are for itself or for later ones, and
    whatever else stands behind its compute.

    >>> ops = "0FETCH_F0 1FETCH_B0 0F0 0F1 0LEAVE_F1 0FETCH_B0 1F0 1B0 1F1 1B1 1LEAVE_B1 0B0 0B1"
    >>> [str(Op.parse(ops.split()[place])) for place in beginnings([*map(Op.parse, ops.split())])]
    ['0FETCH_F0', '0FETCH_B0', '0B0']
    """
    starts: list[int] = []
    stage: int | None = None
    start: int | None = 0 if ops else None  # of a visit whose stage nobody knows yet
    for place, op in enumerate(ops):
        if op.kind in FETCHES:
            start = place if start is None else start
        elif op.kind in NEED_WEIGHTS:
            if op.stage != stage:
                starts.append(place if start is None else start)
            stage, start = op.stage, None
    return starts


def visited(ops: Sequence[Op]) -> int:
    """The stage of a visit, given all of its ops."""
    return next(op.stage for op in ops if op.kind in NEED_WEIGHTS)


def check_fleet_plan(plan: Plan) -> None:
    """Raise ``InputError`` for a plan whose visits cannot take turns with those of other jobs."""
    if plan.num_ranks > 1 or plan.num_tensor_ranks > 1:
        raise InputError(
            f"the plan has {plan.num_seats} ranks, and a fleet gives a job one device at "
            "a time; plan it for one device (with a tier, if it does not fit), or train it by "
            "itself with Pipeline"
        )
    if plan.versions.asynchronous:
        raise InputError(
            f"{plan.schedule} never flushes, so that minibatches have no visits of their "
            "own; plan with a synchronous schedule, such as spilled or gpipe"
        )


def check_name(name: Any) -> None:
    """Raise ``InputError`` for a name that no folder can have."""
    expect(name, str, "the name of a job", "give a text")
    if not name or name in (".", "..") or set(name) & set("/\\\0"):
        raise InputError(
            f"no job can be called {shown(name)}, since its folder could not; leave out slashes"
        )


def visits_of(plan: Plan) -> tuple[StageVisit, ...]:
    """The visits of one of many minibatches, update included, as the plan predicts them.

    Raises:
        InputError: the plan has several ranks, or never flushes.
    """
    check_fleet_plan(plan)
    prediction = plan.prediction
    if plan.spill is None:
        lowered = add_update(plan.build_schedule())
    else:
        lowered = with_residence(prediction.placement, plan.spill)
    (ops,) = lowered.ranks
    costs = prediction.costs
    stays = stays_of(ops) if plan.spill is not None else {}
    kept = {stay.stage for stay in stays.values() if stay.keeps}
    starts = beginnings(ops)
    visits: list[StageVisit] = []
    for start, end in zip(starts, [*starts[1:], len(ops)], strict=True):
        visit = _visit(ops[start:end], costs, stays)
        if not visits and visit.stage in kept:  # since the minibatch before
            visit = visit._replace(fetch_seconds=0.0)
        visits.append(visit)
    return tuple(visits)


def _visit(ops: Sequence[Op], costs: Costs, stays: dict[Op, StageResidency]) -> StageVisit:
    stage = visited(ops)
    backward = any(op.kind is Kind.BACKWARD for op in ops)
    seconds = sum(costs.duration(op) for op in ops)
    stay = next((stays[op] for op in ops if op.kind in LEAVES and op.stage == stage), None)
    if stay is None:
        return StageVisit(stage, backward, seconds)
    state = costs.state_seconds(stage) if stay.updates else 0.0
    return StageVisit(stage, backward, seconds, costs.fetching(stay), state, costs.leaving(stay))
