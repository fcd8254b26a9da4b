"""``HandOver``: a plan in the words of another engine (``penstock.planning.handover`` makes it)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.base.errors import printable
from penstock.base.values import write_atomically

if TYPE_CHECKING:
    from penstock.planning.plans.plan import Plan


class HandOver(NamedTuple):
    """A plan in the words of another engine. ``str`` is what its users paste.

    Attributes:
        engine: its name, as ``Plan.to`` takes it.
        files: by name, the texts of what it takes; the first is ``str``.
        notes: what it does otherwise than the plan, and what that costs by the simulator.
        plan: what the engine performs; the plan itself, where nothing was noted.
    """

    engine: str
    files: dict[str, str]
    notes: tuple[str, ...]
    plan: Plan

    def __str__(self) -> str:
        return printable(next(iter(self.files.values())))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all files into a folder, and the notes as ``notes.txt`` if there are any.

        Raises:
            FileError: the folder cannot be made or written.
        """
        for name, text in self.files.items():
            write_atomically(Path(folder) / name, text)
        if self.notes:
            write_atomically(Path(folder) / "notes.txt", "\n".join(self.notes) + "\n")
