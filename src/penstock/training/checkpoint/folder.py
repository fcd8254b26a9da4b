"""A folder of checkpoints: which there are, which are complete, and which may go.

``plan.json`` and pieces come into a checkpoint's folder in any order, from several processes that
do not wait for each other. So nothing here says "complete"; it follows from what is there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock.base.arguments import nearest
from penstock.base.errors import FileError
from penstock.base.values import expect, read_text
from penstock.planning.plans import Plan
from penstock.training.checkpoint.header import Identity
from penstock.training.checkpoint.piece import CheckpointPiece, flush, piece_name

PLAN = "plan.json"


class IncompleteError(FileError):
    """A file of a checkpoint is missing, or is of another attempt than the rest."""


_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def folder_name(step: int, generation: int = 0) -> str:
    """The name of the folder of a step's checkpoint.

    Args:
        step: how many minibatches were trained on.
        generation: of the pipeline that writes it, where an earlier one has written that step:
            nothing that is complete is ever written over.

    >>> folder_name(100), folder_name(100, 2)
    ('step-00000100', 'step-00000100.2')
    """
    return f"step-{step:08d}{f'.{generation}' if generation else ''}"


def is_folder_name(name: str) -> bool:
    """Whether a folder is that of one checkpoint, by its name."""
    return _NAME.fullmatch(name) is not None


def digest(plan: Plan) -> str:
    """A text that tells a plan from others."""
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
    pieces: tuple[CheckpointPiece, ...]

    @classmethod
    def opened(cls, folder: Path) -> Checkpoint:
        """Read the heads of a checkpoint's pieces.

        Raises:
            IncompleteError: it is not complete.
            FileError: a file of it cannot be read; which, and why.
        """
        if not folder.is_dir():
            raise FileError(f"there is no folder {folder}")
        if not (folder / PLAN).exists():
            raise IncompleteError(f"{folder} is not complete: it has no {PLAN}")
        plan = Plan.from_json(read_text(folder / PLAN), str(folder / PLAN))
        pieces = [piece for stage in range(len(plan.stages)) for piece in _pieces_of(folder, stage)]
        first = pieces[0].header.identity
        if first.plan != digest(plan):
            raise FileError(
                f"{folder} is not complete: {pieces[0].path.name} was written for another plan "
                f"than {PLAN}"
            )
        if first.num_stages != len(plan.stages) or first.step != step_of(folder):
            raise FileError(
                f"{pieces[0].path} says that it is of step {first.step} of {first.num_stages} "
                f"stages, but {folder.name} and its {PLAN} are not"
            )
        for piece in pieces[1:]:
            if piece.header.identity != first:
                raise IncompleteError(
                    f"{folder} is not complete: {piece.path.name} and {pieces[0].path.name} are "
                    f"not of the same {_difference(first, piece.header.identity)}"
                )
        return cls(folder, plan, tuple(pieces))

    @property
    def identity(self) -> Identity:
        """The identity on which all pieces of the checkpoint agree."""
        return self.pieces[0].header.identity

    @property
    def step(self) -> int:
        """How many minibatches were trained on."""
        return self.identity.step

    @cached_property
    def pieces_with(self) -> dict[str, list[CheckpointPiece]]:
        """The pieces that have some of a tensor, by its name."""
        pieces: dict[str, list[CheckpointPiece]] = {}
        for piece in self.pieces:
            for name in piece.header.tensors:
                pieces.setdefault(name, []).append(piece)
        return pieces

    @property
    def num_bytes(self) -> int:
        """The size of all pieces."""
        return sum(piece.num_bytes for piece in self.pieces)


def is_incomplete(folder: Path) -> bool:
    """Whether a file of a checkpoint is missing; not, whether one cannot be read."""
    try:
        Checkpoint.opened(folder)
    except IncompleteError:
        return True
    except FileError:
        return False
    return False


def _pieces_of(folder: Path, stage: int) -> list[CheckpointPiece]:
    whole = folder / piece_name(stage)
    first = whole if whole.exists() else folder / piece_name(stage, 0, 2)
    if not first.exists():
        raise IncompleteError(f"{folder} is not complete: {whole.name} is missing")
    pieces = [CheckpointPiece.opened(first)]
    num_parts = pieces[0].header.num_parts
    for part in range(1, num_parts):
        path = folder / piece_name(stage, part, num_parts)
        if not path.exists():
            raise IncompleteError(f"{folder} is not complete: {path.name} is missing")
        pieces.append(CheckpointPiece.opened(path))
    for part, piece in enumerate(pieces):
        header = piece.header
        if (header.stage, header.part, header.num_parts) != (stage, part, num_parts):
            raise FileError(
                f"{piece.path} says that it is part {header.part} of {header.num_parts} of stage "
                f"{header.stage}; it has the name of another piece"
            )
    return pieces


def _difference(first: Identity, other: Identity) -> str:
    names = [
        name for name in Identity.__struct_fields__ if getattr(first, name) != getattr(other, name)
    ]
    return " and ".join(names[:2])


def step_of(folder: Path) -> int:
    """The step of a checkpoint by its folder's name; -1 if that is no name of one."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def generation_of(folder: Path) -> int:
    """The generation that a folder's name gives, see ``folder_name``."""
    match = _NAME.fullmatch(folder.name)
    return int(match[2] or 0) if match else 0


@dataclass(frozen=True)
class SeenCheckpoint:
    """A folder of a checkpoint, complete or not, with what its first piece says.

    Attributes:
        folder: where it lies.
        step: by its name.
        identity: ``None`` if the first piece is not there or cannot be read.
    """

    folder: Path
    step: int
    identity: Identity | None


def folders_in(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, in no order.

    Raises:
        FileError: the run's folder cannot be read.
    """
    try:
        return [path for path in run.iterdir() if is_folder_name(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FileError(f"cannot read {run}: {error.strerror}") from None


def seen_in(run: Path) -> list[SeenCheckpoint]:
    """The checkpoints in a run's folder, complete or not, the latest first: those of the latest
    pipeline, and of these that of the highest step.

    Raises:
        FileError: the folder cannot be read.
    """
    seen = [SeenCheckpoint(path, step_of(path), _first_identity(path)) for path in folders_in(run)]
    latest = max(
        (checkpoint.identity.generation for checkpoint in seen if checkpoint.identity), default=0
    )

    def age(checkpoint: SeenCheckpoint) -> tuple[int, int, str]:
        # What cannot be read is taken for new, so that a warning tells of it.
        generation = checkpoint.identity.generation if checkpoint.identity else latest
        return generation, checkpoint.step, checkpoint.folder.name

    return sorted(seen, key=age, reverse=True)


def _first_identity(folder: Path) -> Identity | None:
    for name in (piece_name(0), piece_name(0, 0, 2)):
        with suppress(FileError):
            return CheckpointPiece.opened(folder / name).header.identity
    return None


def complete(run: Path) -> Iterator[Checkpoint]:
    """The complete checkpoints of a run, the latest first; of others a warning says what is
    missing."""
    for checkpoint in seen_in(run):
        try:
            yield Checkpoint.opened(checkpoint.folder)
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


def like_it(run: Path) -> Path | None:
    """A run with checkpoints beside a folder that is not there, whose name is nearly the same."""
    if run.exists() or not run.parent.is_dir():
        return None
    others = (other for other in run.parent.iterdir() if other.is_dir())
    names = [other.name for other in others if any(seen_in(other))]
    near = nearest(run.name, names)
    return None if near is None else run.parent / near


def run_of(path: Path) -> Path:
    """The folder of the run that a path names, which may be a checkpoint's own."""
    return path.parent if is_folder_name(path.name) else path


def prune(run: Path, keep: int) -> None:
    """Remove all complete checkpoints but the latest ones, and what is older than these.

    Args:
        run: the run's folder.
        keep: how many stay.
    """
    num_complete = 0
    for checkpoint in seen_in(run):
        if num_complete >= keep:
            remove(checkpoint.folder)
            continue
        with suppress(FileError):
            Checkpoint.opened(checkpoint.folder)
            num_complete += 1


def remove(folder: Path) -> None:
    """Remove a checkpoint as far as that is possible; other ranks may remove it, too. Without its
    plan it is not complete, so a kill leaves no half of one that looks whole."""
    with suppress(OSError):
        (folder / PLAN).unlink(missing_ok=True)
        flush(folder)
        shutil.rmtree(folder, ignore_errors=True)


def as_path(path: object) -> Path:
    """A folder as users give it, wherever this process goes from here.

    Raises:
        InputError: it is no path.
        FileError: no folder can be called so.
    """
    expect(path, str | os.PathLike, "the folder of checkpoints", 'give a path, such as "runs/a"')
    text = os.fspath(path)  # type: ignore[call-overload]
    if "\0" in text:
        raise FileError(f"no folder can be called {text!r}; leave the null byte out")
    whole = Path(os.path.abspath(text))
    try:
        whole.exists()
    except OSError as error:
        raise FileError(f"no folder can be called {text}: {error.strerror}") from None
    return whole
