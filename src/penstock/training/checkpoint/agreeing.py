"""What all ranks of a job load: the same checkpoint, which fits each one's stages."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from penstock.base.errors import FileError
from penstock.engine.run.assembly import Assembly
from penstock.engine.run.drive.driver import told
from penstock.training.checkpoint.contents import Contents
from penstock.training.checkpoint.folder import (
    checkpoint_in,
    generation_of,
    is_incomplete,
    run_of,
    seen_in,
)
from penstock.training.checkpoint.giving import check_fits, check_model, check_settings
from penstock.training.checkpoint.pieces_here import PiecesHere

_PURPOSE = "loading a checkpoint"


class SeenByRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank sees in a run's folder; rank 0's counts.

    Attributes:
        folder: the name of the checkpoint that it would load; empty if there is none.
        attempt: that wrote it.
        generation: of the next pipeline that writes here.
        folders: the names of all that are there, complete or not.
        incomplete: of these, those of which a file is missing; only rank 0 looks.
        attempts: those that have written here.
    """

    folder: str
    attempt: str
    generation: int
    folders: list[str]
    incomplete: list[str]
    attempts: list[str]


def agreed(
    parts: Assembly, path: Path, scaler: torch.amp.GradScaler | None, *, weights_only: bool
) -> tuple[Contents | None, SeenByRank]:
    """What all ranks load, and what they see in the folder: they must see the same.

    Args:
        parts: the pipeline.
        path: the run's folder, or that of one checkpoint.
        scaler: the user's, if there is one.
        weights_only: whether optimizers and schedulers need not fit.

    Returns:
        What the checkpoint holds, ``None`` if there is none; and what rank 0 sees in the folder.

    Raises:
        FileError, InputError: it does not fit, or ranks see different folders.
        PeerError, DeadlineError: another rank failed or did not come.
    """
    meeting = parts.meet(_PURPOSE)
    try:
        contents = _fitting(parts, path, scaler, weights_only=weights_only)
        looks = meeting is None or meeting.rank == 0
        own = _seen_by_rank(run_of(path), contents, looks=looks)
    except Exception as error:
        if meeting is not None:
            meeting.fail(f"rank {meeting.rank} failed {_PURPOSE}: {told(error)}")
        raise
    if meeting is None:
        return contents, own
    found = meeting.exchange(own, SeenByRank, "to load a checkpoint")
    for rank, other in enumerate(found):
        if (other.folder, other.attempt) != (found[0].folder, found[0].attempt):
            raise FileError(
                f"rank 0 sees {found[0].folder or 'no checkpoint'} in {path} as the latest, "
                f"and rank {rank} {other.folder or 'none'}; put the folder where all hosts see "
                "the same files"
            )
    return contents, found[0]


def _fitting(
    parts: Assembly, path: Path, scaler: torch.amp.GradScaler | None, *, weights_only: bool
) -> Contents | None:
    """What the checkpoint holds that a path names, if it fits this process's stages."""
    checkpoint = checkpoint_in(path)
    if checkpoint is None:
        return None
    contents = Contents(checkpoint)
    check_model(contents, parts.layout.keys)
    trains = any(worker.updater.optimizers for worker in parts.workers)
    if trains and not weights_only:
        check_settings(
            contents,
            parts.layout.weights.first_stages,
            scales=scaler is not None and bool(scaler.state_dict()),
            schedules=any(worker.updater.schedulers for worker in parts.workers),
        )
    for _, trained in PiecesHere(parts).trained():
        check_fits(contents, trained, weights_only=weights_only)
    contents.position  # noqa: B018 - refused before anything has changed
    return contents


def _seen_by_rank(run: Path, contents: Contents | None, *, looks: bool) -> SeenByRank:
    seen = seen_in(run)
    identities = [one.identity for one in seen if one.identity is not None]
    # By name as well, so that nobody writes into a folder of which only a part can be read.
    generations = [one.generation for one in identities] + [
        generation_of(one.folder) for one in seen
    ]
    return SeenByRank(
        "" if contents is None else contents.checkpoint.folder.name,
        "" if contents is None else contents.checkpoint.identity.attempt,
        1 + max(generations, default=-1),
        sorted(one.folder.name for one in seen),
        sorted(one.folder.name for one in seen if looks and is_incomplete(one.folder)),
        sorted({identity.attempt for identity in identities}),
    )
