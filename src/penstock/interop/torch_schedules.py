"""Schedules to and from ``torch.distributed.pipelining``: the same ops, so the same text.

torch keeps what reads, validates, lowers and simulates an order under private names. They are
looked up in one place, so that another torch either offers them all or is refused by name. Text
from torch is read by our own parser: torch's accepts ``0F1xyz`` as ``0F1``.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from penstock.errors import InputError, ScheduleError
from penstock.schedule import Kind, Op, Schedule
from penstock.schedule.check import check
from penstock.schedule.lower import MESSAGES
from penstock.schedule.op import COMMUNICATION, COMPUTE

Order = dict[int, list[Any]]
"""torch's form of a schedule: the actions of each rank, by rank."""

_MODULE = "torch.distributed.pipelining.schedules"
_NAMES = {
    "action": "_Action",
    "validate": "_validate_schedule",
    "lower": "_add_send_recv",
    "simulate": "_simulate_comms_compute",
}
_NEEDED = {kind: receive for kind, (receive, _, _) in MESSAGES.items()}
_RECEIVES = frozenset(_NEEDED.values())
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_SHARDS = re.compile(r"(0|[1-9]\d*)(UNSHARD|RESHARD)")
_REDUCE = re.compile(r"(0|[1-9]\d*)REDUCE_GRAD")


class _Torch(NamedTuple):
    action: Any
    validate: Callable[..., dict[int, int]]
    lower: Callable[..., Order]
    simulate: Callable[..., Order]


def to_torch(schedule: Schedule) -> Order:
    """The schedule as torch's actions, read by torch from the schedule's own text.

    Args:
        schedule: compute only.

    Returns:
        By rank, a list of ``torch.distributed.pipelining.schedules._Action``.

    Raises:
        ScheduleError: the schedule is not sound, or holds what torch has no word for: stages with
            copies on several ranks, slices of a microbatch, ops of our passes.
        InputError: this torch lacks the private names.
    """
    torch = _torch()
    check(schedule)
    _check_expressible(schedule)
    rows = csv.reader(io.StringIO(str(schedule)))
    return {rank: [torch.action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}


def validate_with_torch(schedule: Schedule) -> dict[int, int]:
    """Let torch's validator judge the schedule; the rank of each stage, as torch infers it.

    Raises:
        ScheduleError: as ``to_torch``, or torch refuses it; torch's reason is in the message.
        InputError: this torch lacks the private names.
    """
    torch, order = _torch(), to_torch(schedule)
    counts = schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    with _refusals("validator"):
        return torch.validate(order, *counts)


def lower_with_torch(schedule: Schedule) -> Order:
    """torch's own communication lowering of the schedule: its sends, and its receives as early as
    the senders allow.

    Raises:
        ScheduleError: as ``validate_with_torch``.
        InputError: this torch lacks the private names.
    """
    torch, places = _torch(), validate_with_torch(schedule)
    with _refusals("communication lowering"):
        # torch's lowering empties the order that it is given.
        return torch.lower(to_torch(schedule), places.__getitem__, schedule.num_stages)


def simulate_with_torch(schedule: Schedule) -> Order:
    """torch's simulation of its lowered order: by rank, the action of each step, or ``None``.

    Every action, messages too, takes one step there, so the number of steps compares orders of the
    same kind and is no makespan.

    Raises:
        ScheduleError: as ``validate_with_torch``.
        InputError: this torch lacks the private names.
    """
    torch, places = _torch(), validate_with_torch(schedule)
    lowered = lower_with_torch(schedule)
    with _refusals("simulator"):
        return torch.simulate(lowered, places.__getitem__, schedule.num_stages)


def from_torch_csv(text: str, name: str = "") -> Schedule:
    """Read the CSV that torch's schedules dump, compute only or lowered, and check it.

    Compute keeps its order. torch's receives are posted early and waited for right before the op
    that needs them; ours are the wait, so that is where they come to stand. An
    ``(0F1;3B0)OVERLAP_F_B`` becomes its F, then its B: torch runs them one after the other too,
    unless a user's function overlaps them; in a lowered order, the messages of both stand behind
    B. What torch adds for stages whose weights are sharded is left out: ``UNSHARD`` and
    ``RESHARD``, which do nothing to other stages, and ``REDUCE_GRAD``, which must stand behind the
    stage's last gradient.

    Args:
        text: one line per rank, cells separated by commas; empty cells are idle.
        name: for people.

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


def _wait_late(ops: tuple[Op, ...]) -> Iterator[Op]:
    """Put each receive right before the op that needs it; the order was checked, so none is left
    over."""
    posted = {op for op in ops if op.kind in _RECEIVES}
    for op in ops:
        if op not in posted:
            receive = op._replace(kind=_NEEDED.get(op.kind, op.kind))
            if receive in posted:
                yield receive
            yield op


def _read_cell(cell: str, ops: list[Op], reduced: dict[int, str]) -> None:
    """Append a cell's ops; remember the reductions seen on this rank, by stage."""
    if not cell:
        return
    if _SHARDS.fullmatch(cell):
        return
    if match := _REDUCE.fullmatch(cell):
        reduced[int(match[1])] = cell
        return
    overlap = _OVERLAP.fullmatch(cell)
    found = [Op.parse(part.strip()) for part in (overlap[1].split(";") if overlap else [cell])]
    if overlap and [op.kind for op in found] != [Kind.FORWARD, Kind.BACKWARD]:
        raise ScheduleError(f"{cell!r} is not one F and one B; torch overlaps nothing else")
    for op in found:
        if op.slice or op.kind not in COMPUTE | COMMUNICATION:
            raise ScheduleError(f"{op} is one of our ops, but not an action of torch's")
        if op.stage in reduced and op.kind in COMPUTE:
            raise ScheduleError(f"{op} stands behind {reduced[op.stage]}, which ends its stage")
    ops += found


def _check_expressible(schedule: Schedule) -> None:
    what = None
    other = next((op for op in schedule.where if op.kind not in COMPUTE), None)
    if other is not None:
        what = f"{other}: hand it the compute ops alone, which its own passes lower"
    elif schedule.num_slices > 1:
        what = "slices of a microbatch's sequence"
    elif schedule.weight_copies > 1:
        what = "a stage on two ranks"
    if what:
        raise ScheduleError(f"torch's schedules have no word for {what} ({schedule.name})")


@contextlib.contextmanager
def _refusals(judge: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, ValueError, RuntimeError, KeyError) as error:
        raise ScheduleError(f"torch's {judge} refuses the schedule: {error}") from error


def _torch() -> _Torch:
    try:
        module = importlib.import_module(_MODULE)
        return _Torch(*(getattr(module, _NAMES[field]) for field in _Torch._fields))
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"this torch does not offer {', '.join(_NAMES.values())} in {_MODULE} ({error}); they "
            "are private and may move: take a torch that has them, 2.13 for one"
        ) from error
