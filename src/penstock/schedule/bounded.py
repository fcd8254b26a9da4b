"""Messages through channels that hold only a few: which receives must come before their time."""

from __future__ import annotations

from penstock.schedule.check import room_needed
from penstock.schedule.op import Op
from penstock.schedule.schedule import Schedule


def hoist_receives(schedule: Schedule, capacity: int) -> Schedule:
    """Move as few receives to the front as keep a schedule from deadlock where a channel holds
    ``capacity`` messages and a full one makes its sender wait.

    Receives stand right before the ops that use them. Some orders, breadth-first for one, send many
    messages long before the first is used; a receive then has to take its message out of the way.
    It is moved only once nothing else can go on, and to where its rank waits at that moment.

    Args:
        schedule: lowered: with explicit messages.
        capacity: at least 1.
    """
    rows = [list(ops) for ops in schedule.ranks]
    room = dict(room_needed(schedule, capacity))
    position = [0] * len(rows)
    done: set[Op] = set()
    while any(at < len(row) for at, row in zip(position, rows, strict=True)):
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row) and _can_run(schedule, row[position[rank]], room, done):
                done.add(row[position[rank]])
                position[rank] += 1
                moved = True
        if moved:
            continue
        # Nothing goes on. A full channel is to blame, unless the schedule deadlocks by itself.
        waits = [row[at] for at, row in zip(position, rows, strict=True) if at < len(row)]
        wanted = [
            room[op]
            for op in waits
            if op in room and room[op] not in done and _can_run(schedule, room[op], room, done)
        ]
        if not wanted:
            break
        for receive in wanted:
            rank = schedule.where[receive]
            rows[rank].remove(receive)
            rows[rank].insert(position[rank], receive)
    return Schedule.of(rows, schedule.name)


def _can_run(schedule: Schedule, op: Op, room: dict[Op, Op], done: set[Op]) -> bool:
    return (op not in room or room[op] in done) and done.issuperset(schedule.dependencies(op))
