"""``run_contest``: methods train in turns, and what each of them gave becomes a record. Devices
that are not here are emulated: every rank a process, compute a wait.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, get_args

from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.base.units import count_of
from penstock.base.values import one_of, whole
from penstock.core.cluster import Cluster, Link
from penstock.core.cluster.local import usable_cores
from penstock.core.timing.timeline import Timeline
from penstock.drawing.contest import ONE_DEVICE, ContestRecord
from penstock.engine.model import microbatches as cutting
from penstock.planning.plans import Plan
from penstock.training.rehearsal import rehearse
from penstock.trial.contest.entrants import (
    Entrant,
    InProcesses,
    Trainer,
    counted_bytes,
)
from penstock.trial.contest.judging import check_sameness, judged, references
from penstock.trial.contest.methods import ALL_CORES, ContestSetting, Method, Stage, chosen_methods
from penstock.trial.workload import Batch, Workload, check_repeats, on_one_device, pipelined

_STEPS = 4
_KIB = 1024


class _EmulatedPace(NamedTuple):
    """The time of a step on emulated devices.

    Attributes:
        seconds: of a minibatch; without a flush, in the steady state.
        timeline: as it was measured.
    """

    seconds: float
    timeline: Timeline


def _pace_of(plan: Plan) -> _EmulatedPace:
    """Rehearse a plan with its own times.

    Raises:
        InputError: it has something that emulated devices do not have.
        RunError: a process failed.
    """
    largest = max((stage.transfer_bytes for stage in plan.stages), default=0)
    performed = rehearse(plan, steps=_STEPS, message_bytes=max(_KIB, largest))
    if performed.steady_seconds is not None:
        return _EmulatedPace(
            performed.steady_seconds.measured * plan.num_microbatches, performed.measured
        )
    return _EmulatedPace(performed.measured.makespan, performed.measured)


_REPEATS, _PATIENCE_SECONDS = 3, 1.0
"""How often layers are measured, and how long what sharing a machine costs: a contest is no place
for the last per cent."""

_COUNTED = 2
"""Minibatches of the run in which memory is counted: the second has all that is ever kept."""


class ContestStep(NamedTuple):
    """How far a contest is.

    Attributes:
        doing: what was done last, in words.
        done, total: parts of the contest.
    """

    doing: str
    done: int
    total: int


Progress = Callable[[ContestStep], None]


def run_contest(  # noqa: PLR0913 - one keyword for each thing that can be asked for
    load: Callable[[], Workload],
    *,
    methods: Sequence[str] = (),
    num_devices: int = 2,
    num_microbatches: int = 8,
    num_steps: int = 40,
    seconds: float = math.inf,
    stage: Stage | None = None,
    link: Link | None = None,
    target: float | None = None,
    progress: Progress | None = None,
) -> ContestRecord:
    """Train a workload with every method, in turns, and compare them.

    Args:
        load: makes the workload; a function that other processes can import, since ways to sum
            gradients are compared between processes.
        methods: keys of ``METHODS``; all by default. One device always takes part.
        num_devices: that a method may take.
        num_microbatches: per minibatch.
        num_steps: minibatches that each method trains on.
        seconds: after so much time no new round of turns begins, so there may be fewer steps.
        stage: ``"cores"``: ranks are threads and processes of this machine, and as fast as it is.
            ``"emulated"``: each rank is a process whose compute is a wait as long as the profile
            says, so that more devices than cores can be compared; weights and losses come from
            threads. By default ``"cores"`` where there is a core for each device.
        link: between any two emulated devices, which messages and sums of gradients wait for; by
            default links are so fast that they do not count.
        target: a loss to be reached; by default what one device has at the end of the turn in
            the middle.
        progress: called after each part of the contest.

    Returns:
        A row for every method. One that cannot run, or raises, ends alone, and its row has the
        reason.

    Raises:
        InputError: a count below 1, an unknown method, a target that is not finite, no minibatch, a
            link between cores, or a workload that gives other weights or data when asked again.
    """
    whole("num_devices", num_devices, 1, 64)
    whole("num_steps", num_steps, 1)
    chosen = chosen_methods(methods, num_devices)
    if target is not None and not math.isfinite(target):
        raise InputError(f"the target is {target}, but must be a finite number")
    if stage is None:
        stage = "cores" if num_devices <= usable_cores() and link is None else "emulated"
    if stage == "cores" and link is not None:
        raise InputError("cores of one machine have no link; leave it out, or emulate devices")
    one_of("stage", stage, get_args(Stage))
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        cluster = replace(Cluster.local(num_devices), link=link or Link())
        setting = _setting(load, cluster, num_microbatches, stage, folder)
        tell = _Teller(progress, len(chosen), -(-num_steps // setting.turn))
        tell("profiled")
        entrants = [_entered(method, setting, tell) for method in chosen]
        try:
            # Only now, since processes begin meanwhile.
            for entrant in entrants:
                if entrant.takes_part and setting.workload.held_out is not None:
                    entrant.attempt(entrant.note_loss)
            _rounds(entrants, setting, num_steps, end, tell)
            check_sameness(entrants, references(entrants, setting))
        finally:
            for entrant in entrants:
                entrant.close()
        return judged(entrants, setting, target)


class _Teller:
    """Counts the parts of a contest."""

    def __init__(self, progress: Progress | None, num_methods: int, num_rounds: int) -> None:
        self._progress, self._done = progress, 0
        self._total = 1 + num_methods * (1 + num_rounds)

    def __call__(self, doing: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(ContestStep(doing, self._done, self._total))


def _setting(
    load: Callable[[], Workload], cluster: Cluster, count: int, stage: Stage, folder: str
) -> ContestSetting:
    workload = load()
    check_repeats(workload)
    inputs, _ = workload.first_batch()
    rows = cutting.num_rows(inputs, "inputs")
    # Devices that are not here do not share this machine.
    ranks = min(len(cluster.devices), usable_cores()) if stage == "cores" else 0
    graph = workload.profile(
        count,
        repeats=_REPEATS,
        sizes=[rows],
        ranks=ranks if ranks > 1 else 0,
        patience_seconds=_PATIENCE_SECONDS,
    )
    return ContestSetting(workload, load, graph, cluster, count, rows, folder, stage)


def _entered(method: Method, setting: ContestSetting, tell: _Teller) -> Entrant:
    """A method, planned, counted and built; or with the reason why it is not."""
    entrant = Entrant(method)
    entrant.attempt(partial(_prepare, entrant, setting))
    tell(f"{method.title}: {'ready' if entrant.takes_part else 'cannot run'}")
    return entrant


def _prepare(entrant: Entrant, setting: ContestSetting) -> None:
    method = entrant.method
    entrant.plan = plan = method.planned(setting)
    entrant.where = _where(method, plan, setting)
    if plan.spill is None:
        batches = list(islice(setting.workload.batches(), _COUNTED))
        entrant.activation_bytes = counted_bytes(setting, plan, batches)
    if setting.stage == "emulated":
        pace = _pace_of(plan)
        entrant.paced_seconds, entrant.paced = pace.seconds, pace.timeline
    if method.runs == "alone":
        entrant.trainer = _alone(method, setting)
    elif method.runs == "processes" and setting.stage == "cores":
        # A parameter server is a rank of its own; a summation server is not.
        count = plan.num_seats + (plan.summing.reducer == "parameter-server")
        entrant.trainer = InProcesses(setting.load, plan, count, setting.folder)
    else:
        entrant.trainer = pipelined(setting.workload, plan)


def _alone(method: Method, setting: ContestSetting) -> Trainer:
    count = setting.num_microbatches if method.key == ONE_DEVICE else 1
    num_threads = setting.num_devices if method.key == ALL_CORES else 1
    return on_one_device(setting.workload, count, num_threads)


def _where(method: Method, plan: Plan, setting: ContestSetting) -> str:
    seats = plan.num_seats
    server = " + server" if method.num_servers else ""
    if setting.stage == "emulated":
        devices = count_of(seats, "emulated device")
        return devices if seats == 1 else f"{devices}{server}, learned in threads"
    if method.key == ALL_CORES:
        return count_of(setting.num_devices, "thread")
    kind = "processes" if method.runs == "processes" else "threads"
    cores = usable_cores()
    shared = f" on {count_of(cores, 'core')}" if seats > cores else ""
    return f"{seats} {kind}{server}{shared}" if seats > 1 else "1 thread"


def _rounds(
    entrants: Sequence[Entrant], setting: ContestSetting, num_steps: int, end: float, tell: _Teller
) -> None:
    """All methods in turns, each round beginning with another one, until steps or time run out."""
    batches = setting.workload.batches()
    trained, longest, number = 0, 0.0, 0
    while turn := list(islice(batches, min(setting.turn, num_steps - trained))):
        began = time.monotonic()
        if number and began + longest > end:
            return
        shift = number % len(entrants)
        for entrant in (*entrants[shift:], *entrants[:shift]):
            if entrant.takes_part:
                entrant.attempt(partial(_take_turn, entrant, turn))
            tell(f"{entrant.method.title}: {trained + len(turn)} minibatches")
        trained, number = trained + len(turn), number + 1
        longest = max(longest, time.monotonic() - began)


def _take_turn(entrant: Entrant, batches: Sequence[Batch]) -> None:
    assert entrant.trainer is not None  # it takes part
    entrant.trainer.take_turn(batches)
    entrant.note_loss()
