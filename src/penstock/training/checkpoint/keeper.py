"""Saves and loads what one pipeline trains."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import FileError, InputError
from penstock.base.values import flag, whole, write_atomically
from penstock.engine.run.assembly import Assembly
from penstock.engine.run.drive.driver import told
from penstock.engine.run.minibatch import StateMark
from penstock.engine.run.recipe import LossScale
from penstock.training.checkpoint.agreeing import PiecesHere, agreed
from penstock.training.checkpoint.contents import Contents
from penstock.training.checkpoint.folder import (
    PLAN,
    Checkpoint,
    IncompleteError,
    as_path,
    digest,
    folder_name,
    folders_in,
    is_folder_name,
    prune,
    remove,
    run_of,
    step_of,
)
from penstock.training.checkpoint.giving import give
from penstock.training.checkpoint.header import FORMAT, Header, Identity, extent_of, to_json
from penstock.training.checkpoint.piece import (
    apart,
    flush,
    is_piece_name,
    piece_name,
    write_piece,
)
from penstock.training.checkpoint.saving import Checkpoints, Saver, StreamMark
from penstock.training.checkpoint.taking import PartState, StageState, TrainedStage, state_of


class Loaded(NamedTuple):
    """The point from which a pipeline goes on.

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
        self._pieces = PiecesHere(parts)
        self._grad_scaler = grad_scaler
        self._saver = Saver()
        self._run = parts.attempt
        self._generation = 0
        self._before: frozenset[Path] = frozenset()
        """Folders of checkpoints that were there when this pipeline loaded one, or none."""
        self._abandoned: frozenset[Path] = frozenset()
        """Of these, those that were not complete."""
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
        self._take_over(run)
        identity = self._identity(step, position)
        if self._parts.plan.spill is not None:
            for worker in self._parts.workers:
                worker.apply_deferred()
            if background:
                shelved = list(self._shelved())
                self._saver.begin(partial(self._write_shelved, run, identity, shelved, keep))
                return
            # One stage at a time is in memory, so its piece is written before the next one comes.
            self._write(run, identity, self._in_turn(), keep)
            return
        states = [(trained, self._state(trained)) for trained in self._pieces.written()]
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
        for worker, trained in self._pieces.held():
            with worker.visiting(trained.stage.index):
                yield trained, self._state(trained)

    def _shelved(self) -> Iterator[tuple[TrainedStage, StageState]]:
        """The state of each stage that comes and goes, as it lies on the tier; what does not is
        copied."""
        for worker, trained in self._pieces.held():
            assert worker.residence is not None
            with worker.visiting(trained.stage.index):
                state = self._state(trained)
                there = worker.residence.shelved(trained.stage.index, state.tensors)
                rest = {name: tensor for name, tensor in state.tensors.items() if name not in there}
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

    def _take_over(self, run: Path) -> None:
        """Raise ``FileError`` if somebody else saves in a folder: nobody would know which run goes
        on from it. What never became complete is nobody's; what an attempt before this one has
        left so is removed, or a disk with room for one more would be full after one kill."""
        for folder in folders_in(run):
            if folder in self._known:
                continue
            try:
                theirs = Checkpoint.opened(folder).identity
            except IncompleteError:
                if folder in self._abandoned:
                    remove(folder)
                continue  # or it may become complete
            except FileError:
                continue
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
        taken = any(step_of(folder) == step for folder in self._before if folder.parent == run)
        return run / folder_name(step, self._generation if taken else 0)

    def _identity(self, step: int, position: Any) -> Identity:
        scale = self._parts.workers[0].updater.loss_scale
        scaler = {}
        if self._grad_scaler is not None and scale is not None:
            scale.store(self._grad_scaler)  # in a loop that goes on, the ranks know it alone
            scaler = self._grad_scaler.state_dict()
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
        if self._pieces.with_first_rank:
            write_atomically(str(folder / PLAN), self._parts.plan.to_json() + "\n")
            flush(folder / PLAN)
            self._remove_foreign(folder)
        for trained, state in states:
            self._write_piece(folder, identity, trained, state)
            del state  # a stage that comes and goes must not be seen when it leaves
        if self._pieces.with_first_rank and keep is not None:
            prune(run, keep)

    def _write_piece(
        self, folder: Path, identity: Identity, trained: TrainedStage, state: StageState
    ) -> None:
        tensors, extra, optimizing, under_way, extents, shelved = state
        on_tier = {name: extents.get(name) or extent_of(tensor) for name, tensor in shelved.items()}
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
            in_memory = apart({name: tensor for name, (_, tensor) in piece.tensors.items()})
            write_piece(folder, header, {**in_memory, **shelved})

    def mark(self, wanted: Checkpoints, step: int, *, position: Any = None) -> StateMark:
        """A mark that saves every stage behind a minibatch of a stream that goes on.

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
        self._take_over(run)
        stages = {trained.stage.index: trained for trained in self._pieces.written()}
        identity = self._identity(step, position)

        def write(states: Mapping[int, StageState]) -> None:
            pairs = [(stages[index], state) for index, state in states.items()]
            self._saver.begin(partial(self._write, run, identity, pairs, wanted.keep))

        return StreamMark(stages, self._state, write)

    def _remove_foreign(self, folder: Path) -> None:
        """Pieces of an earlier attempt's plan with more stages."""
        own = {
            piece_name(stage, part, count)
            for stage, count in enumerate(self._pieces.counts())
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
        contents, seen = agreed(self._parts, folder, self._grad_scaler, weights_only=weights_only)
        if not weights_only:
            self._generation = seen.generation
            self._before = frozenset(run_of(folder) / name for name in seen.folders)
            self._abandoned = frozenset(run_of(folder) / name for name in seen.incomplete)
        if contents is None:
            return None
        for worker in self._parts.workers:
            worker.drop_deferred()
        for worker, trained in self._pieces.trained():
            with worker.visiting(trained.stage.index, changes=True):
                give(contents, trained, weights_only=weights_only)
        if weights_only:
            self._parts.feed.resume(0)
            return Loaded(0, 0)
        identity = contents.checkpoint.identity
        self._run = identity.run
        self._attempts = {self._parts.attempt, *seen.attempts}
        self._parts.streams.seed = identity.seed
        self._resume(contents, identity)
        if self._grad_scaler is not None and identity.scaler:
            scale = LossScale.of_state(identity.scaler)
            scale.store(self._grad_scaler)
            for worker in self._parts.workers:
                worker.updater.loss_scale = scale
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

    def check(self) -> None:
        """Raise what has gone wrong in the background, if anything has.

        Raises:
            FileError: a checkpoint could not be written.
        """
        self._saver.check()

    def close(self, error: BaseException | None = None) -> None:
        """Wait until the last checkpoint is on the disk.

        Args:
            error: one that is on its way; it learns in a note what could not be written.

        Raises:
            FileError: it could not be written, and no other error is on its way.
        """
        try:
            self._saver.close()
        except FileError as failure:
            if error is None:
                raise
            error.add_note(f"The last checkpoint was not written: {told(failure)}")


def _run_folder(path: object) -> Path:
    run = as_path(path)
    if is_folder_name(run.name):
        raise InputError(
            f"{run} is the folder of one checkpoint; save to that of the run, {run.parent}"
        )
    return run
