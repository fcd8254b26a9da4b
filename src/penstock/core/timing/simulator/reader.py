"""What brings things from a tier to a rank: one at a time, and first what is needed first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf


@dataclass(eq=False)
class Read:
    """Something that is to come.

    Attributes:
        stage, number: whose it is, as ``Transfer`` has it.
        needed_at: the place, among the rank's ops, of the first one that needs it.
        release: before when it cannot begin.
        left: how long it still takes.
        end: when it has come; ``None`` as long as nobody knows.
    """

    stage: int
    number: int
    needed_at: int
    release: float
    left: float
    end: float | None = None


class Reader:
    """Reads what is needed first, and goes on later with what it has begun, as ``weights.lane``
    does: so nothing ever comes later because something else was asked for early.

    Times are found when somebody asks for them: until then what was asked for meanwhile may come
    first. Who waits for one thing asks for no other before it has come.

    Args:
        note: told of each stretch in which something comes: what, from when to when.
    """

    def __init__(self, note: Callable[[Read, float, float], None]) -> None:
        self._note = note
        self._asked: list[Read] = []
        self._free = 0.0

    def ask(self, read: Read) -> Read:
        """Let something come; gives it back."""
        self._asked.append(read)
        return read

    def end_of(self, read: Read) -> float:
        """When something has come."""
        while read.end is None:
            self._go_on()
        return read.end

    def finish(self) -> None:
        """Let all come that was asked for."""
        while self._asked:
            self._go_on()

    def _go_on(self) -> None:
        begin = max(self._free, min(read.release for read in self._asked))
        chosen = min(
            (read for read in self._asked if read.release <= begin),
            key=lambda read: read.needed_at,
        )
        more_urgent = min(
            (
                read.release
                for read in self._asked
                if read.release > begin and read.needed_at < chosen.needed_at
            ),
            default=inf,
        )
        end = begin + chosen.left
        if end <= more_urgent:
            self._asked.remove(chosen)
            chosen.end = end
        else:
            end = more_urgent
            chosen.left -= end - begin
        self._free = end
        self._note(chosen, begin, end)
