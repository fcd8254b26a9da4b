"""A folder of checkpoints: which there are, which are complete, and which may go.

``plan.json`` and pieces come into a checkpoint's folder in any order, from several processes that
do not wait for each other. So nothing here says "complete"; it follows from what is there.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock.checkpoint.header import Identity
from penstock.checkpoint.piece import Piece, flush, is_piece_name, piece_name
from penstock.errors import FileError
from penstock.plans import Plan
from penstock.values import expect, read_text

PLAN = "plan.json"
_NAME = re.compile(r"step-(\d{8,})")


def folder_name(step: int) -> str:
    """The name of the folder of a step's checkpoint.

    >>> folder_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def is_folder_name(name: str) -> bool:
    """Whether a folder is that of one checkpoint, by its name."""
    return _NAME.fullmatch(name) is not None


def digest(plan: Plan) -> str:
    """What tells a plan from others."""
    return hashlib.blake2b(plan.to_json().encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        folder: where it lies.
        plan: the one that was run when it was written.
        pieces: all of them, by stage and part.
    """

    folder: Path
    plan: Plan
    pieces: tuple[Piece, ...]

    @classmethod
    def opened(cls, folder: Path) -> Checkpoint:
        """Read the heads of a checkpoint's pieces.

        Raises:
            FileError: it is not complete, or a file of it cannot be read; which, and why.
        """
        if not folder.is_dir():
            raise FileError(f"there is no folder {folder}")
        if not (folder / PLAN).exists():
            raise FileError(f"{folder} is not complete: it has no {PLAN}")
        plan = Plan.from_json(read_text(folder / PLAN), str(folder / PLAN))
        pieces = [piece for stage in range(len(plan.stages)) for piece in _pieces_of(folder, stage)]
        first = pieces[0].header.identity
        if first.plan != digest(plan):
            raise FileError(
                f"{folder} is not complete: {pieces[0].path.name} was written for another plan "
                f"than {PLAN}"
            )
        for piece in pieces[1:]:
            if piece.header.identity != first:
                raise FileError(
                    f"{folder} is not complete: {piece.path.name} and {pieces[0].path.name} are "
                    f"not of the same {_difference(first, piece.header.identity)}"
                )
        return cls(folder, plan, tuple(pieces))

    @property
    def identity(self) -> Identity:
        """What all pieces say of the checkpoint."""
        return self.pieces[0].header.identity

    @property
    def step(self) -> int:
        """How many minibatches were trained on."""
        return self.identity.step

    @cached_property
    def pieces_with(self) -> dict[str, list[Piece]]:
        """The pieces that have some of a tensor, by its name."""
        pieces: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            for name in piece.header.tensors:
                pieces.setdefault(name, []).append(piece)
        return pieces

    @property
    def num_bytes(self) -> int:
        """The size of all pieces."""
        return sum(piece.num_bytes for piece in self.pieces)


def _pieces_of(folder: Path, stage: int) -> list[Piece]:
    """All pieces of a stage."""
    whole = folder / piece_name(stage)
    first = whole if whole.exists() else folder / piece_name(stage, 0, 2)
    if not first.exists():
        raise FileError(f"{folder} is not complete: {whole.name} is missing")
    pieces = [Piece.opened(first)]
    num_parts = pieces[0].header.num_parts
    for part in range(1, num_parts):
        path = folder / piece_name(stage, part, num_parts)
        if not path.exists():
            raise FileError(f"{folder} is not complete: {path.name} is missing")
        pieces.append(Piece.opened(path))
    for part, piece in enumerate(pieces):
        header = piece.header
        if (header.stage, header.part, header.num_parts) != (stage, part, num_parts):
            raise FileError(
                f"{piece.path} says that it is part {header.part} of {header.num_parts} of stage "
                f"{header.stage}; it has the name of another piece"
            )
    return pieces


def _difference(one: Identity, other: Identity) -> str:
    names = [
        name for name in Identity.__struct_fields__ if getattr(one, name) != getattr(other, name)
    ]
    return " and ".join(names[:2])


def folders(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, complete or not, the latest step first."""
    if not run.is_dir():
        return []
    numbered = (
        (int(match[1]), path)
        for path in run.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    )
    return [path for _, path in sorted(numbered, reverse=True)]


def complete(run: Path) -> Iterator[Checkpoint]:
    """The complete checkpoints of a run, the latest first; of others a warning says what is
    missing."""
    for folder in folders(run):
        try:
            yield Checkpoint.opened(folder)
        except FileError as error:
            warnings.warn(f"skipped: {error}", RuntimeWarning, stacklevel=3)


def checkpoint_in(path: Path) -> Checkpoint | None:
    """The checkpoint that a path names: that very one, or the latest complete one of a run.

    Returns:
        ``None`` if the path is that of no run yet.

    Raises:
        FileError: the path is a checkpoint's own and that is not complete, or it is no folder.
    """
    if is_folder_name(path.name):
        return Checkpoint.opened(path)
    if path.exists() and not path.is_dir():
        raise FileError(f"{path} is a file; give the folder in which a run's checkpoints are")
    return next(complete(path), None)


def run_in(run: Path) -> str | None:
    """The name of the run whose checkpoints are in a folder; ``None`` if there are none."""
    for folder in folders(run):
        for path in sorted(folder.iterdir()):
            if is_piece_name(path.name):
                with suppress(FileError):
                    return Piece.opened(path).header.identity.run
    return None


def prune(run: Path, keep: int) -> None:
    """Remove all complete checkpoints but the latest ones, and what is older than these.

    Args:
        run: the run's folder.
        keep: how many stay.
    """
    num_complete = 0
    for folder in folders(run):
        if num_complete >= keep:
            _remove(folder)
            continue
        with suppress(FileError):
            Checkpoint.opened(folder)
            num_complete += 1


def _remove(folder: Path) -> None:
    """Without its plan a checkpoint is not complete, so a kill leaves no half of one that looks
    whole."""
    with suppress(OSError):
        (folder / PLAN).unlink(missing_ok=True)
        flush(folder)
        shutil.rmtree(folder)


def as_path(path: object) -> Path:
    """A folder as users give it.

    Raises:
        InputError: it is no path.
    """
    expect(path, str | Path, "the folder of checkpoints", 'give a path, such as "runs/a"')
    return Path(str(path))
