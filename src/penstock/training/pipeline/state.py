"""The weights of a pipeline, and checkpoints of all that it trains."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from penstock.base.arguments import public
from penstock.base.errors import FileError, InputError
from penstock.base.telling import tell, tells
from penstock.base.values import whole
from penstock.engine.run.assembly import by_key, copied_states
from penstock.training.checkpoint.folder import as_path, like_it
from penstock.training.checkpoint.pretrained import save_pretrained
from penstock.training.pipeline.running import RunningPipeline

if TYPE_CHECKING:
    from penstock.training.checkpoint.export import MeshEdge


class PipelineState(RunningPipeline):
    """Gives the weights of a pipeline and takes them; saves all that it trains, and goes on from
    there."""

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this process's stages under the unsplit model's keys: in
        threads, which share the process, of all stages.

        They are those that are trained on; copies in main memory, where stages come and go.

        Raises:
            InputError: other ranks have parts of the same layers; see ``gather_state_dict``.
        """
        if self._parts.in_parts:
            raise InputError(
                "this process has parts of its stages' layers, which it shares with other "
                "ranks; gather them with gather_state_dict(), which every rank must call"
            )
        if self.plan.spill is None:
            return by_key(self._parts.states())
        with self._exclusively():
            return by_key(copied_states(self._parts))

    def gather_state_dict(self, *, rank: int | None = None) -> dict[str, Tensor]:
        """Copies of the whole model's parameters and buffers in main memory, under its keys and in
        its order, as ``model.load_state_dict`` takes them. All processes must call it, between
        steps.

        Args:
            rank: of the process that gets them, which saves the others time and memory; they get
                an empty dictionary. By default every process gets them.

        Raises:
            InputError: there is no such process.
            RunError: another process did not call it, or with another ``rank``.
        """
        if rank is not None:
            num_processes = dist.get_world_size() if self._parts.in_processes else 1
            whole("rank", rank, 0, num_processes - 1)
        with self._exclusively():
            states = copied_states(self._parts)
            gathered = self._parts.driver.gather(states, self._parts.feed.expected(), rank)
        return by_key(self._parts.joined(gathered))

    def expert_loads(self) -> dict[str, list[float]]:
        """The share of tokens that each expert has had so far, of all replicas, by the name of its
        mixture: of those of this process's stages whose replicas divide experts. All processes must
        call it, between steps."""
        with self._exclusively():
            divided = (stage.experts for stage in self._parts.stages.values())
            return {
                name: loads
                for experts in divided
                if experts is not None
                for name, loads in experts.loads().items()
            }

    def dtensor_state_dict(self) -> dict[str, Tensor]:
        """Copies of parameters and buffers in main memory, under the unsplit model's keys, as
        ``torch.distributed.checkpoint`` saves them and loads into them.

        Returns:
            Those of this process's stages, as ``DTensor``s over the axes ``("data", "tensor")`` of
            a ``DeviceMesh`` of all processes, whose other axis is ``"pipe"``. Where one process has
            all ranks there is no mesh: whole tensors of all stages.

        Raises:
            InputError: stages have different numbers of copies or of tensor ranks.
            PeerError, DeadlineError: another process did not call it; all must, between steps.
        """
        if not self._parts.in_processes:
            state = self.state_dict().items()
            tensors = {key: value for key, value in state if isinstance(value, Tensor)}
            return {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}
        with self._exclusively():
            return self._mesh_edge.taken()

    def load_dtensor_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take parameters and buffers from what ``dtensor_state_dict`` gave, on this pipeline or
        another one, after ``torch.distributed.checkpoint`` has loaded into it; or from whole
        tensors. Optimizers keep their state.

        Args:
            state: by the unsplit model's keys; it may have more than this process's stages need.

        Raises:
            InputError: a key is missing, or a value has another shape or other placements; nothing
                has changed then.
            PeerError, DeadlineError: another process did not call it; all must, between steps.
        """
        with self._exclusively():
            self._mesh_edge.give(state)
            self._elsewhere.stale = True

    @cached_property
    def _mesh_edge(self) -> MeshEdge:
        from penstock.training.checkpoint.export import MeshEdge  # DTensors take long to import

        return MeshEdge(self._parts)

    @public()
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = None,
        position: Any = None,
        background: bool = True,
    ) -> None:
        """Write a checkpoint: weights, buffers, optimizer state, schedulers, loss scale, and what
        resumes random layers. Every process writes its own stages; all must call it after the same
        step.

        Args:
            path: the folder of the run, the same on all ranks. The checkpoint of step 100 becomes
                ``step-00000100`` in it, and is complete once all of its files are there.
            keep: how many complete checkpoints stay, the latest ones; by default all.
            position: where the run is in its data: numbers, texts or ``None``, in lists, tuples and
                dictionaries. By default how many minibatches were trained on.
            background: copy the state to main memory, return, and write the copy while training
                goes on; it stays allocated for the next time. Stages that come and go are read
                from their tier instead, which keeps what is to be read beside what is new.
                Otherwise return when the files are on the disk.

        Raises:
            InputError: gradients of ``step(update=False)`` wait for their update, or something is
                neither tensor nor JSON.
            FileError: the folder is another run's, or a file could not be written; of a checkpoint
                in the background, the next call of this pipeline raises it, or ``close``.
        """
        with self._exclusively():
            if self._accumulates:
                raise InputError(
                    "gradients of step(…, update=False) wait for their update, and a checkpoint "
                    "holds none; save after the step that updates"
                )
            self._keeper.save(path, self._step, keep=keep, position=position, background=background)

    @tells("writing weights")
    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the weights as ``save_pretrained`` of transformers does, and a model's ``config``
        beside them: ``from_pretrained`` loads the folder, and so does ``initial_weights``. Every
        process writes the files of its own stages, rank 0 the index, or up to 5 GB one file of all
        of them; all must call it, between steps.

        Args:
            folder: the same on all ranks, where all hosts see it. What an earlier call has written
                there is replaced, if it is one file, or was written with as many stages.

        Raises:
            InputError: tensor ranks in processes have parts of layers, or a layer keeps what is
                neither parameter nor buffer.
            FileError: the folder has weights of another save, or a file could not be written.
            PeerError, DeadlineError: another process failed, or did not call it.
        """
        with self._settled():
            save_pretrained(self._parts, self._model, folder)

    @tells("loading a checkpoint")
    @public()
    def load(self, path: str | os.PathLike[str], *, weights_only: bool = False) -> Any:
        """Go on from a checkpoint, whatever plan and transport wrote it: what follows is what would
        have followed there. All processes must call it.

        Args:
            path: the folder of a run, of which the latest complete checkpoint is taken (a warning
                names what was skipped); or a checkpoint's own, such as ``runs/a/step-00000100``.
            weights_only: take parameters and buffers only, and begin at step 0; the position is 0.

        Returns:
            The position that ``save`` was given; ``None`` if there is no complete checkpoint yet,
            as before the first run. A line on standard error says so, and a warning where a folder
            of nearly the same name has checkpoints.

        Raises:
            FileError: a file cannot be read, or is of another model, or with ``weights_only`` there
                is none; nothing has changed then.
            InputError: the optimizer or the scheduler is another one; nothing has changed then.
            PeerError, DeadlineError: another rank failed, or did not call it.
        """
        with self._exclusively():
            loaded = self._keeper.load(path, weights_only=weights_only)
        if loaded is None:
            self._say_that_none_is_there(as_path(path), weights_only=weights_only)
            return None
        self._elsewhere.stale = True
        self._step = loaded.step
        if not weights_only:
            self._accumulates = False
            for worker in self._parts.workers:
                worker.updater.drop_gradients()
        return loaded.position

    def _say_that_none_is_there(self, folder: Path, *, weights_only: bool) -> None:
        """Whoever asks for weights needs some; whoever resumes may be at the beginning of a run, or
        may have mistyped its folder."""
        text = f"there is no complete checkpoint in {folder}"
        if weights_only:
            raise FileError(f"{text}, so there are no weights to take; give the folder of a run")
        if not self.is_first:
            return
        near = like_it(folder)
        if near is None:
            tell(f"{text} yet, so training begins at step {self._step}")
        else:
            warnings.warn(
                f"{text}, so training begins at step {self._step}; {near} has some, if that is "
                "meant",
                RuntimeWarning,
                stacklevel=5,  # who calls ``load``, around which are two wrappers
            )
