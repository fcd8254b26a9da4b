"""Saves and loads what one pipeline trains."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from penstock.checkpoint.contents import Contents
from penstock.checkpoint.division import Division, PartState
from penstock.checkpoint.folder import (
    PLAN,
    Checkpoint,
    as_path,
    checkpoint_in,
    digest,
    folder_name,
    folders_in,
    is_folder_name,
    prune,
    run_of,
    seen_in,
)
from penstock.checkpoint.giving import check_fits, check_model, check_settings, give
from penstock.checkpoint.header import FORMAT, Header, Identity, extent_of
from penstock.checkpoint.marking import StreamMark
from penstock.checkpoint.piece import (
    flush,
    is_piece_name,
    piece_name,
    write_piece,
)
from penstock.checkpoint.plain import to_json
from penstock.checkpoint.saver import Saver
from penstock.checkpoint.taking import StageState, TrainedStage, state_of
from penstock.checkpoint.wanted import Checkpoints
from penstock.errors import FileError, InputError
from penstock.plans.serving import servers_of
from penstock.run.assembly import Assembly
from penstock.run.drive.driver import told
from penstock.run.minibatch import Mark
from penstock.run.rank.mail import Letter
from penstock.run.rank.worker import Worker
from penstock.run.recipe import LossScale
from penstock.run.seating import Seat
from penstock.stage.stage import Stage
from penstock.values import flag, whole, write_atomically

_PURPOSE = "loading a checkpoint"


class _Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank sees in a run's folder; rank 0's counts.

    Attributes:
        folder: the name of the checkpoint that it would load; empty if there is none.
        attempt: that wrote it.
        generation: of the next pipeline that writes here.
        steps: those that have a folder already.
        attempts: those that have written here.
    """

    folder: str
    attempt: str
    generation: int
    steps: list[int]
    attempts: list[str]


class Loaded(NamedTuple):
    """What a pipeline goes on from.

    Attributes:
        step: how many minibatches were trained on.
        position: as it was given to ``save``; by default the step.
    """

    step: int
    position: Any


class Keeper:
    """Saves and loads the state of a pipeline's stages in this process.

    Args:
        parts: the pipeline.
        grad_scaler: the user's, whose state belongs to the rest.
    """

    def __init__(self, parts: Assembly, grad_scaler: torch.amp.GradScaler | None) -> None:
        self._parts = parts
        self._grad_scaler = grad_scaler
        self._saver = Saver()
        self._run = parts.attempt
        self._generation = 0
        self._resumed: Path | None = None
        self._steps: frozenset[int] = frozenset()
        self._attempts = {parts.attempt}
        self._known: set[Path] = set()

    def save(
        self, path: object, step: int, *, keep: int | None, position: Any, background: bool
    ) -> None:
        """Write a checkpoint of this process's stages.

        Args:
            path: the run's folder.
            step: how many minibatches were trained on.
            keep: how many complete checkpoints stay; ``None``: all.
            position: where the run is in its data.
            background: copy the state and write it while training goes on.

        Raises:
            InputError: something cannot be saved.
            FileError: this or an earlier checkpoint could not be written, or the folder is that of
                another run.
        """
        run = _run_folder(path)
        if keep is not None:
            whole("keep", keep, 1)
        flag("background", background)
        self._saver.wait()
        self._check_own(run)
        identity = self._identity(step, position)
        if self._parts.plan.spill is not None:
            for worker in self._parts.workers:
                worker.settle()
            if background:
                shelved = list(self._shelved())
                self._saver.begin(partial(self._write_shelved, run, identity, shelved, keep))
                return
            # One stage at a time is in memory, so its piece is written before the next one comes.
            self._write(run, identity, self._in_turn(), keep)
            return
        states = [(trained, self._state(trained)) for trained in self._written_here()]
        if background:
            states = [
                (trained, state._replace(tensors=self._copied(trained, state)))
                for trained, state in states
            ]
        write = partial(self._write, run, identity, states, keep)
        if background:
            self._saver.begin(write)
        else:
            write()

    def _in_turn(self) -> Iterator[tuple[TrainedStage, StageState]]:
        """The state of each stage that comes and goes, while it is in memory."""
        for worker, trained in self._held_here():
            with worker.visiting(trained.stage.index):
                yield trained, self._state(trained)

    def _shelved(self) -> Iterator[tuple[TrainedStage, StageState]]:
        """The state of each stage that comes and goes, as it lies on the tier; what does not is
        copied."""
        for worker, trained in self._held_here():
            assert worker.residence is not None
            with worker.visiting(trained.stage.index):
                state = self._state(trained)
                there = worker.residence.shelved(trained.stage.index, state.tensors)
                rest = {name: one for name, one in state.tensors.items() if name not in there}
                copies = self._saver.copied(trained.whose, rest)
                taken = state._replace(tensors=copies, shelved=there)
                del state, rest  # nothing may see a stage when it leaves
            yield trained, taken

    def _write_shelved(
        self,
        run: Path,
        identity: Identity,
        states: Sequence[tuple[TrainedStage, StageState]],
        keep: int | None,
    ) -> None:
        try:
            self._write(run, identity, states, keep)
        finally:
            for _, state in states:
                for shelved in state.shelved.values():
                    shelved.extent.is_held = False

    def _copied(self, trained: TrainedStage, state: StageState) -> dict[str, Tensor]:
        return self._saver.copied(f"{trained.whose}, part {trained.part}", state.tensors)

    def _check_own(self, run: Path) -> None:
        """Raise ``FileError`` if somebody else saves in a folder: nobody would know which run goes
        on from it. What never became complete is nobody's."""
        for folder in folders_in(run):
            if folder in self._known:
                continue
            try:
                theirs = Checkpoint.opened(folder).identity
            except FileError:
                continue  # it may become complete
            if theirs.attempt not in self._attempts:
                raise FileError(
                    f"another job saves in {run}, too, after both went on from there; stop one of "
                    "them, or let it save to a new folder"
                    if theirs.run == self._run
                    else f"{run} has the checkpoints of another run; call pipeline.load("
                    f"{str(run)!r}) to go on from there, or save to a new folder"
                )
            self._known.add(folder)

    def _folder(self, run: Path, step: int) -> Path:
        """Where the checkpoint of a step goes: never over one that an earlier pipeline wrote."""
        taken = run == self._resumed and step in self._steps
        return run / folder_name(step, self._generation if taken else 0)

    def _identity(self, step: int, position: Any) -> Identity:
        scaler = self._grad_scaler.state_dict() if self._grad_scaler is not None else {}
        return Identity(
            format=FORMAT,
            run=self._run,
            attempt=self._parts.attempt,
            generation=self._generation,
            step=step,
            num_stages=len(self._parts.plan.stages),
            plan=digest(self._parts.plan),
            seed=self._parts.streams.seed,
            position=to_json(step if position is None else position, "position"),
            scaler=scaler,
        )

    def _trained(self) -> Iterator[tuple[Worker, TrainedStage]]:
        """The stages of each rank of this process."""
        for worker in self._parts.workers:
            updater = worker.updater
            for index, stage in worker.stages.items():
                assert isinstance(stage, Stage)
                yield (
                    worker,
                    TrainedStage(
                        stage,
                        updater.holdings[index].named,
                        updater.optimizers.get(index),
                        updater.schedulers.get(index),
                        updater.rates[index],
                        worker.stores.get(index),
                        partial(_letters, worker),
                        self._division(index, worker.seat),
                        updater.shards.of,
                        *self._part(worker.rank, index),
                    ),
                )

    def _division(self, stage: int, seat: Seat) -> Division | None:
        sharings = self._parts.layout.sharings
        if sharings is None:
            return None
        return Division(
            sharings.cut_keys,
            sharings.shapes,
            sharings.num_blocks[stage],
            seat.coordinate,
            seat.size,
        )

    def _part(self, rank: int, stage: int) -> tuple[int, int]:
        """(which of a stage's copies a rank has, how many pieces the stage has): copies are equal,
        and one is written, unless each rank has a part of the optimizer's state."""
        copies = sorted(self._parts.plan.placement.ranks_of(stage))
        servers = servers_of(self._parts.plan, stage)
        if not servers:
            return copies.index(rank), len(copies) if self._is_sharded else 1
        # The first piece has the weights, each of the others what one parameter server keeps.
        if rank in servers:
            return 1 + servers.index(rank), 1 + len(servers)
        return (0 if rank == copies[0] else 1 + len(servers)), 1 + len(servers)

    @property
    def _is_sharded(self) -> bool:
        return self._parts.in_processes and self._parts.plan.summing.reducer == "sharded"

    def _written_here(self) -> Iterator[TrainedStage]:
        return (trained for _, trained in self._held_here())

    def _held_here(self) -> Iterator[tuple[Worker, TrainedStage]]:
        """The stages that are written here, and the workers that have them."""
        for worker, trained in self._trained():
            if trained.part < trained.num_parts:
                yield worker, trained

    def _state(self, trained: TrainedStage) -> StageState:
        first = self._parts.layout.weights.first_stages
        index = trained.stage.index
        return state_of(trained, {name for name in trained.named if first[name] < index})

    def _write(
        self,
        run: Path,
        identity: Identity,
        states: Iterable[tuple[TrainedStage, StageState]],
        keep: int | None,
    ) -> None:
        folder = self._folder(run, identity.step)
        if self._is_first:
            write_atomically(str(folder / PLAN), self._parts.plan.to_json() + "\n")
            flush(folder / PLAN)
            self._remove_foreign(folder)
        for trained, state in states:
            self._write_piece(folder, identity, trained, state)
            del state  # a stage that comes and goes must not be seen when it leaves
        if self._is_first and keep is not None:
            prune(run, keep)

    @property
    def _is_first(self) -> bool:
        return any(worker.seat.number == 0 for worker in self._parts.workers)

    def _write_piece(
        self, folder: Path, identity: Identity, trained: TrainedStage, state: StageState
    ) -> None:
        tensors, extra, optimizing, under_way, extents, shelved = state
        on_tier = {name: extents.get(name) or extent_of(one) for name, one in shelved.items()}
        if trained.division is None:
            placed = {
                name: (extents.get(name) or extent_of(tensor), tensor)
                for name, tensor in tensors.items()
            }
            pieces: Iterable[PartState] = [PartState(trained.part, trained.num_parts, placed)]
        else:
            copy = trained.part, trained.num_parts
            pieces = trained.division.pieces(tensors, extents, *copy)
        for piece in pieces:
            header = Header(
                identity=identity,
                stage=trained.stage.index,
                part=piece.part,
                num_parts=piece.num_parts,
                tensors={name: extent for name, (extent, _) in piece.tensors.items()} | on_tier,
                # Of tensor ranks, all have the same of what is no tensor.
                extra=extra if piece.tells else {},
                optimizing=optimizing if piece.tells else None,
                under_way=under_way if piece.tells else (),
            )
            in_memory = _apart({name: one for name, (_, one) in piece.tensors.items()})
            write_piece(folder, header, {**in_memory, **shelved})

    def mark(self, wanted: Checkpoints, step: int, *, position: Any = None) -> Mark:
        """What saves every stage behind a minibatch of a stream that goes on.

        Args:
            wanted: where to save.
            step: how many minibatches will have been trained on then.
            position: where the run is in its data; by default the step.

        Raises:
            FileError: an earlier checkpoint could not be written, or the folder is another run's.
        """
        if self._parts.layout.sharings is not None:
            raise InputError(
                "the members of a group come to the end of a minibatch at different times, and "
                "write one checkpoint; leave drain=False out, or plan with tensor_ranks=1"
            )
        run = _run_folder(wanted.folder)
        self._saver.wait()  # or copies would pile up where the disk is slower than training
        self._check_own(run)
        stages = {trained.stage.index: trained for trained in self._written_here()}
        identity = self._identity(step, position)

        def write(states: Mapping[int, StageState]) -> None:
            pairs = [(stages[index], state) for index, state in states.items()]
            self._saver.begin(partial(self._write, run, identity, pairs, wanted.keep))

        return StreamMark(stages, self._state, write)

    def _num_pieces(self) -> list[int]:
        """Of each stage."""
        plan, sharings = self._parts.plan, self._parts.layout.sharings
        blocks = [1] * len(plan.stages) if sharings is None else sharings.num_blocks
        return [
            stage.tensor_ranks * many * self._part(plan.placement.ranks_of(index)[0], index)[1]
            for index, (stage, many) in enumerate(zip(plan.stages, blocks, strict=True))
        ]

    def _remove_foreign(self, folder: Path) -> None:
        """Pieces of an earlier attempt's plan with more stages."""
        own = {
            piece_name(stage, part, count)
            for stage, count in enumerate(self._num_pieces())
            for part in range(count)
        }
        for path in folder.iterdir():
            if is_piece_name(path.name) and path.name not in own:
                path.unlink(missing_ok=True)

    def load(self, path: object, *, weights_only: bool) -> Loaded | None:
        """Give this process's stages the state of a checkpoint.

        Args:
            path: the run's folder, of which the latest complete checkpoint is taken; or that of one
                checkpoint.
            weights_only: leave optimizers, schedulers, seed and loss scale as they are.

        Returns:
            ``None`` if there is no checkpoint.

        Raises:
            FileError, InputError: it does not fit; nothing has changed then.
            PeerError, DeadlineError: another rank failed or did not come.
        """
        folder = as_path(path)
        flag("weights_only", weights_only)
        self._saver.wait()
        contents, found = self._agreed(folder, weights_only=weights_only)
        if contents is None:
            return None
        for worker in self._parts.workers:
            worker.drop()
        for worker, trained in self._trained():
            with worker.visiting(trained.stage.index, changes=True):
                give(contents, trained, weights_only=weights_only)
        if weights_only:
            self._parts.feed.resume(0)
            return Loaded(0, 0)
        identity = contents.checkpoint.identity
        self._run = identity.run
        self._generation = found.generation
        self._resumed, self._steps = run_of(folder), frozenset(found.steps)
        self._attempts = {self._parts.attempt, *found.attempts}
        self._parts.streams.seed = identity.seed
        self._resume(contents, identity)
        if self._grad_scaler is not None and identity.scaler:
            self._grad_scaler.load_state_dict(identity.scaler)
            for worker in self._parts.workers:
                worker.updater.loss_scale = LossScale.of(self._grad_scaler)
        return Loaded(identity.step, contents.position)

    def _resume(self, contents: Contents, identity: Identity) -> None:
        feed = self._parts.feed
        if not any(piece.header.under_way for piece in contents.checkpoint.pieces):
            feed.resume(identity.step)
        elif identity.plan == digest(self._parts.plan):
            for worker in self._parts.workers:
                worker.resend(contents.letters(worker.rank))
            feed.resume_within(identity.step)
        else:
            feed.resume(identity.step)
            warnings.warn(
                f"{contents.checkpoint.folder} was saved within a stream of another plan; the "
                "gradients that were on their way are of its stages, and are dropped",
                stacklevel=4,
            )

    def _fitting(self, path: Path, *, weights_only: bool) -> Contents | None:
        """What the checkpoint holds that a path names, if it fits this process's stages."""
        checkpoint = checkpoint_in(path)
        if checkpoint is None:
            return None
        contents = Contents(checkpoint)
        check_model(contents, self._parts.layout.keys)
        trains = any(worker.updater.optimizers for worker in self._parts.workers)
        if trains and not weights_only:
            check_settings(
                contents,
                self._parts.layout.weights.first_stages,
                scales=self._grad_scaler is not None and bool(self._grad_scaler.state_dict()),
                schedules=any(worker.updater.schedulers for worker in self._parts.workers),
            )
        for _, trained in self._trained():
            check_fits(contents, trained, weights_only=weights_only)
        contents.position  # noqa: B018 - refused before anything has changed
        return contents

    def _agreed(self, path: Path, *, weights_only: bool) -> tuple[Contents | None, _Found]:
        """What all ranks load, and what they see in the folder: they must see the same."""
        meeting = self._parts.meet(_PURPOSE)
        try:
            contents = self._fitting(path, weights_only=weights_only)
            own = _found(run_of(path), contents)
        except Exception as error:
            if meeting is not None:
                meeting.fail(f"rank {meeting.rank} failed {_PURPOSE}: {told(error)}")
            raise
        if meeting is None:
            return contents, own
        found = meeting.exchange(own, _Found, "to load a checkpoint")
        for rank, other in enumerate(found):
            if (other.folder, other.attempt) != (found[0].folder, found[0].attempt):
                raise FileError(
                    f"rank 0 sees {found[0].folder or 'no checkpoint'} in {path} as the latest, "
                    f"and rank {rank} {other.folder or 'none'}; put the folder where all hosts see "
                    "the same files"
                )
        return contents, found[0]

    def check(self) -> None:
        """Raise what has gone wrong in the background, if anything has.

        Raises:
            FileError: a checkpoint could not be written.
        """
        self._saver.check()

    def close(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            FileError: it could not be written.
        """
        self._saver.close()


def _letters(worker: Worker) -> Sequence[Letter]:
    return worker.letters


def _run_folder(path: object) -> Path:
    run = as_path(path)
    if is_folder_name(run.name):
        raise InputError(
            f"{run} is the folder of one checkpoint; save to that of the run, {run.parent}"
        )
    return run


def _found(run: Path, contents: Contents | None) -> _Found:
    seen = seen_in(run)
    identities = [one.identity for one in seen if one.identity is not None]
    return _Found(
        "" if contents is None else contents.checkpoint.folder.name,
        "" if contents is None else contents.checkpoint.identity.attempt,
        1 + max((identity.generation for identity in identities), default=-1),
        sorted({one.step for one in seen}),
        sorted({identity.attempt for identity in identities}),
    )


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: dense, in main memory, none in the memory of another."""
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        address = dense.untyped_storage().data_ptr()
        shares = address in seen or dense.untyped_storage().nbytes() != dense.nbytes
        apart[name] = dense.clone() if shares else dense
        seen.add(address)
    return apart
