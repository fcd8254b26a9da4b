"""``FleetTimeline``: which job had which device when."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import msgspec

from penstock.base.errors import InputError
from penstock.base.lazily import method_provided
from penstock.base.values import Value, whole
from penstock.core.timing.spans import Source

MOST_FLEET_DEVICES = 10_000


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One visit of a job on a device, from ``start`` to ``end`` (seconds since the fleet began).

    Attributes:
        device: its number.
        job: the name of the job.
        step: the job's minibatch, counted from 0.
        stage: what is visited.
        backward: whether backwards run.
        waited: seconds at its beginning in which the stage was still to come into memory.
    """

    device: int
    job: str
    step: int
    stage: int
    backward: bool
    start: float
    end: float
    waited: float = 0.0

    @property
    def label(self) -> str:
        """The work, as in ``2F``: stage 2 forward."""
        return label_of_visit(self.stage, self.backward)


def label_of_visit(stage: int, backward: bool) -> str:
    """Stage and kind, as in ``2F``; the microbatch is left out, since a visit works on all."""
    return f"{stage}{'B' if backward else 'F'}"


# With ``dict``, what follows from the fields is kept beside them.
class FleetTimeline(Value, frozen=True, kw_only=True, dict=True):
    """The turns of a fleet's devices, predicted or measured. A file like all values.

    Attributes:
        jobs: their names, in the fleet's order.
        num_devices: how many shared them.
        turns: in the order of their starts.
        source: ``"predicted"`` or ``"measured"``.
        policy: by which devices chose.
        bound_seconds: what no order of these turns could undercut; 0 where nobody says.
        ended: by job, how it ended if not as it should: why it stopped or failed.

    Raises:
        InputError: a turn is on no device, of no job, or ends before it starts.
    """

    jobs: tuple[str, ...]
    num_devices: int
    turns: tuple[Turn, ...]
    source: Source = "predicted"
    policy: str = "longest"
    bound_seconds: float = 0.0
    ended: dict[str, str] = msgspec.field(default_factory=dict)

    _repr_html_ = method_provided("fleet_cell")

    def __post_init__(self) -> None:
        self.check_fields("the fleet's timeline")
        whole("the fleet's timeline: num_devices", self.num_devices, 1, MOST_FLEET_DEVICES)
        known = set(self.jobs)
        for turn in self.turns:
            if turn.job not in known or not 0 <= turn.device < self.num_devices:
                raise InputError(
                    f"a turn of {turn.job!r} on device {turn.device} belongs to no job or device "
                    f"of this timeline; it has {len(known)} jobs and {self.num_devices} devices"
                )
            if not 0 <= turn.start <= turn.end < float("inf"):
                raise InputError(
                    f"a turn of {turn.job!r} starts at {turn.start} and ends at {turn.end}; give "
                    "the earlier one first"
                )

    @cached_property
    def by_device(self) -> tuple[tuple[Turn, ...], ...]:
        """The turns of each device."""
        rows: list[list[Turn]] = [[] for _ in range(self.num_devices)]
        for turn in self.turns:
            rows[turn.device].append(turn)
        return tuple(map(tuple, rows))

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last turn ends."""
        return max((turn.end for turn in self.turns), default=0.0)

    @property
    def idle(self) -> float:
        """The share of all devices' time in which they had no turn."""
        busy = sum(turn.end - turn.start for turn in self.turns)
        return 1 - busy / (self.num_devices * self.makespan) if self.makespan else 0.0

    @cached_property
    def job_seconds(self) -> Mapping[str, float]:
        """By job, how long it had devices."""
        seconds = dict.fromkeys(self.jobs, 0.0)
        for turn in self.turns:
            seconds[turn.job] += turn.end - turn.start
        return seconds

    @cached_property
    def job_ends(self) -> Mapping[str, float]:
        """By job, when its last turn ended; 0 where it had none."""
        ends = dict.fromkeys(self.jobs, 0.0)
        for turn in self.turns:
            ends[turn.job] = max(ends[turn.job], turn.end)
        return ends
