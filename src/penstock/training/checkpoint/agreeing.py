"""The pieces of a checkpoint that this process's ranks have, and the one checkpoint that all ranks
of a job load, which fits each one's stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch

from penstock.base.errors import FileError
from penstock.engine.run.assembly import Assembly
from penstock.engine.run.drive.driver import told
from penstock.engine.run.rank.work import PendingGradient
from penstock.engine.run.rank.worker import Worker
from penstock.engine.run.seating import RankSeat
from penstock.engine.stage.stage import Stage
from penstock.engine.transport.rendezvous import Rendezvous
from penstock.planning.plans.summing import servers_of
from penstock.training.checkpoint.contents import Contents
from penstock.training.checkpoint.folder import (
    checkpoint_in,
    generation_of,
    is_incomplete,
    run_of,
    seen_in,
)
from penstock.training.checkpoint.giving import check_fits, check_model, check_settings
from penstock.training.checkpoint.taking import StageShard, TrainedStage


class PiecesHere:
    """The stages of a pipeline's ranks in this process, as pieces of a checkpoint.

    Args:
        parts: the pipeline.
    """

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts

    def trained(self) -> Iterator[tuple[Worker, TrainedStage]]:
        """The stages of each rank of this process."""
        for worker in self._parts.workers:
            updater = worker.updater
            for index, stage in worker.stages.items():
                assert isinstance(stage, Stage)
                optimizer = updater.optimizers.get(index)
                yield (
                    worker,
                    TrainedStage(
                        stage,
                        updater.holdings[index].named,
                        optimizer,
                        updater.schedulers.get(index),
                        updater.rates[index],
                        worker.stores.get(index),
                        partial(_letters, worker),
                        self._division(index, worker.seat),
                        updater.shards.of,
                        () if optimizer is None else updater.shards.groups_of(optimizer),
                        *self._part(worker.rank, index),
                    ),
                )

    def _division(self, stage: int, seat: RankSeat) -> StageShard | None:
        sharings = self._parts.layout.sharings
        if sharings is None:
            return None
        return StageShard(
            sharings.cut_keys,
            sharings.shapes,
            sharings.num_blocks[stage],
            seat.coordinate,
            seat.size,
        )

    def _part(self, rank: int, stage: int) -> tuple[int, int]:
        """(which of a stage's copies a rank has, how many pieces the stage has): copies are equal,
        and one is written, unless each rank has a part of the optimizer's state, or of experts."""
        copies = sorted(self._parts.plan.placement.ranks_of(stage))
        servers = servers_of(self._parts.plan, stage)
        if not servers:
            if self._is_sharded:
                return self._shard(rank, copies)
            return copies.index(rank), self._parts.plan.stages[stage].expert_ranks
        # The first piece has the weights, each of the others what one parameter server keeps.
        if rank in servers:
            return 1 + servers.index(rank), 1 + len(servers)
        return (0 if rank == copies[0] else 1 + len(servers)), 1 + len(servers)

    def _shard(self, rank: int, copies: Sequence[int]) -> tuple[int, int]:
        """As ``_part``, where each copy updates a shard; of several hosts that have the same ones,
        the first writes."""
        summing = self._parts.plan.summing
        if summing.reducer != "fully-sharded":
            return copies.index(rank), len(copies)
        near = summing.shard_groups(copies)[0]
        return (near.index(rank) if rank in near else len(near)), len(near)

    @property
    def _is_sharded(self) -> bool:
        reducer = self._parts.plan.summing.reducer
        return self._parts.in_processes and reducer in {"sharded", "fully-sharded"}

    def written(self) -> Iterator[TrainedStage]:
        """The stages that are written here."""
        return (trained for _, trained in self.held())

    def held(self) -> Iterator[tuple[Worker, TrainedStage]]:
        """The stages that are written here, and the workers that have them."""
        for worker, trained in self.trained():
            if trained.part < trained.num_parts:
                yield worker, trained

    @property
    def with_first_rank(self) -> bool:
        """Whether the rank that writes what is no stage's is in this process."""
        return any(worker.seat.number == 0 for worker in self._parts.workers)

    def counts(self) -> list[int]:
        """How many pieces each stage of the plan has."""
        plan, sharings = self._parts.plan, self._parts.layout.sharings
        blocks = [1] * len(plan.stages) if sharings is None else sharings.num_blocks
        return [
            stage.tensor_ranks * many * self._part(plan.placement.ranks_of(index)[0], index)[1]
            for index, (stage, many) in enumerate(zip(plan.stages, blocks, strict=True))
        ]


def _letters(worker: Worker) -> Sequence[PendingGradient]:
    return worker.pending_gradients


@contextmanager
def met(parts: Assembly, purpose: str) -> Iterator[Rendezvous | None]:
    """A meeting of all processes, where others hear of what fails within; ``None`` if there is only
    this one."""
    meeting = parts.meet(purpose)
    try:
        yield meeting
    except Exception as error:
        if meeting is not None:
            meeting.fail(f"rank {meeting.rank} failed {purpose}: {told(error)}")
        raise


class SeenByRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoints that a rank sees in a run's folder; rank 0's view counts.

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
    """The contents that all ranks load, and what they see in the folder: they must see the same.

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
    with met(parts, "loading a checkpoint") as meeting:
        contents = _fitting(parts, path, scaler, weights_only=weights_only)
        looks = meeting is None or meeting.rank == 0
        own = _seen_by_rank(run_of(path), contents, looks=looks)
    if meeting is None:
        return contents, own
    seen = meeting.exchange(own, SeenByRank, "to load a checkpoint")
    for rank, other in enumerate(seen):
        if (other.folder, other.attempt) != (seen[0].folder, seen[0].attempt):
            raise FileError(
                f"rank 0 sees {seen[0].folder or 'no checkpoint'} in {path} as the latest, "
                f"and rank {rank} {other.folder or 'none'}; put the folder where all hosts see "
                "the same files"
            )
    return contents, seen[0]


def _fitting(
    parts: Assembly, path: Path, scaler: torch.amp.GradScaler | None, *, weights_only: bool
) -> Contents | None:
    """The contents of the checkpoint that a path names, if it fits this process's stages."""
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
    identities = [checkpoint.identity for checkpoint in seen if checkpoint.identity is not None]
    # By name as well, so that nobody writes into a folder of which only a part can be read.
    generations = [checkpoint.generation for checkpoint in identities] + [
        generation_of(checkpoint.folder) for checkpoint in seen
    ]
    return SeenByRank(
        "" if contents is None else contents.checkpoint.folder.name,
        "" if contents is None else contents.checkpoint.identity.attempt,
        1 + max(generations, default=-1),
        sorted(checkpoint.folder.name for checkpoint in seen),
        sorted(
            checkpoint.folder.name
            for checkpoint in seen
            if looks and is_incomplete(checkpoint.folder)
        ),
        sorted({identity.attempt for identity in identities}),
    )
