"""Schedules from ``torch.distributed.pipelining`` and for it; nothing here needs torch.

The ops are the same, so their text is, too. What torch's schedules dump as CSV is read by our own
parser: torch's accepts ``0F1xyz`` as ``0F1``. What torch reads is ``str(schedule)``, if torch has
words for all of it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from penstock.base.errors import ScheduleError
from penstock.core.schedule import Kind, Op, Schedule
from penstock.core.schedule.check import check
from penstock.core.schedule.lower import add_communication
from penstock.core.schedule.op import COMMUNICATION, COMPUTE, RECEIVED_BY, RECEIVES

_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_SHARDS = re.compile(r"(0|[1-9]\d*)(UNSHARD|RESHARD)")
_WAITS = re.compile(r"(0|[1-9]\d*)(WAIT_REDUCE_GRAD|WAIT_SEND_[FB](0|[1-9]\d*))")  # since 2.15
_REDUCE = re.compile(r"(0|[1-9]\d*)REDUCE_GRAD")


def from_torch_csv(text: str, name: str = "") -> Schedule:
    """Read the CSV that torch's schedules dump, compute only or lowered, and check it.

    Compute keeps its order. torch's receives are posted early and waited for right before the op
    that needs them; ours are the wait, so that is where they come to stand. An
    ``(0F1;3B0)OVERLAP_F_B`` becomes its F, then its B: torch runs them one after the other too,
    unless a user's function overlaps them; in a lowered order, the messages of both stand behind
    B. What torch adds for stages whose weights are sharded is left out: ``UNSHARD`` and
    ``RESHARD``, which do nothing to other stages, and ``REDUCE_GRAD``, which must stand behind the
    stage's last gradient. So are torch's waits for what it has sent or begun to reduce.

    Args:
        text: one line per rank, cells separated by commas; empty cells are idle.

    Raises:
        ScheduleError: a cell is not an action of torch's; or the order is incomplete or deadlocks.
    """
    ranks = []
    for number, row in enumerate(csv.reader(io.StringIO(text, newline="")), start=1):
        ops: list[Op] = []
        reduced: dict[int, str] = {}
        for column, cell in enumerate(row, start=1):
            try:
                _read_cell(cell.strip(), ops, reduced)
            except ScheduleError as error:
                raise ScheduleError(f"line {number}, cell {column}: {error}") from None
        ranks.append(ops)
    if not any(ranks):
        raise ScheduleError("the schedule is empty; write one line of actions per rank")
    posted = Schedule.of(ranks, name)
    check(posted)
    return Schedule.of(map(_wait_late, posted.ranks), name)


def to_torch_csv(schedule: Schedule, *, messages: bool = False) -> str:
    """Write a schedule as the CSV that torch's ``_PipelineScheduleRuntime`` loads, and torchtitan's
    ``pipeline_parallel_schedule_csv`` names.

    Args:
        schedule: of compute ops only.
        messages: add sends and receives, and the ``REDUCE_GRAD`` with which torch divides a
            stage's gradients by the number of microbatches, for the format that torch calls
            ``compute_comms``. By default torch adds its own to ``compute_only``, which it must
            where FSDP shards the weights of stages, and from torch 2.15 on, whose
            ``compute_comms`` also asks where each send is waited for.

    Returns:
        One line per rank, cells separated by commas.

    Raises:
        ScheduleError: it is not complete, or torch has no word for something in it: a stage that
            several ranks have, slices of a sequence, anything but F, I, W and B.
    """
    check(schedule)
    for op in (op for ops in schedule.ranks for op in ops):
        if op.kind not in COMPUTE or op.slice:
            raise ScheduleError(
                f"torch has no word for {op}; give a schedule of F, I, W and B without slices, as "
                "penstock.schedules.build makes it"
            )
    for stage, copies in sorted(schedule.copies.items()):
        if copies > 1:
            raise ScheduleError(
                f"stage {stage} is on {copies} ranks, for which torch has no words; take another "
                "schedule, or plan without replicas"
            )
    if not messages:
        return str(schedule)
    # torch's messages have no names: between two ranks they are taken in the order of their sends.
    lowered = add_communication(schedule, capacity=0)
    return "".join(f"{','.join(_reduced(ops))}\n" for ops in lowered.ranks)


def _reduced(ops: tuple[Op, ...]) -> Iterator[str]:
    """The ops of a rank, with a reduction behind the last gradient of each stage."""
    last = {op.stage: op for op in ops if op.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
    for op in ops:
        yield str(op)
        if last.get(op.stage) == op:
            yield f"{op.stage}REDUCE_GRAD"


def _wait_late(ops: tuple[Op, ...]) -> Iterator[Op]:
    """Put each receive right before the op that needs it; the order was checked, so none is left
    over."""
    posted = {op for op in ops if op.kind in RECEIVES}
    for op in ops:
        if op not in posted:
            receive = op._replace(kind=RECEIVED_BY.get(op.kind, op.kind))
            if receive in posted:
                yield receive
            yield op


def _read_cell(cell: str, ops: list[Op], reduced: dict[int, str]) -> None:
    """Append a cell's ops; remember the reductions seen on this rank, by stage."""
    if not cell:
        return
    if _SHARDS.fullmatch(cell) or _WAITS.fullmatch(cell):
        return
    if match := _REDUCE.fullmatch(cell):
        reduced[int(match[1])] = cell
        return
    overlap = _OVERLAP.fullmatch(cell)
    parts = overlap[1].split(";") if overlap else [cell]
    read = [Op.parse(part.strip()) for part in parts]
    if overlap and [op.kind for op in read] != [Kind.FORWARD, Kind.BACKWARD]:
        raise ScheduleError(f"{cell!r} is not one F and one B; torch overlaps nothing else")
    for op in read:
        if op.slice or op.kind not in COMPUTE | COMMUNICATION:
            raise ScheduleError(f"{op} is one of our ops, but not an action of torch's")
        if op.stage in reduced and op.kind in COMPUTE:
            raise ScheduleError(f"{op} stands behind {reduced[op.stage]}, which ends its stage")
    ops += read
