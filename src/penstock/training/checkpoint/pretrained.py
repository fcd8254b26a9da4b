"""Weights as transformers' ``save_pretrained`` writes them: in one file where that is not too
large, else a file for each stage, and an index.

Every process writes the files of its own stages, so nobody ever has the whole model in memory. The
one file, or the index, comes when all of them are there: whoever finds it finds everything.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import msgspec
from torch import Tensor, nn

from penstock.base.errors import FileError, InputError
from penstock.base.values import write_atomically
from penstock.engine.model.spine import NamedLayer, spine_of
from penstock.engine.run.assembly import Assembly
from penstock.engine.run.given_weights import INDEX, Index, names_by_tensor, places
from penstock.engine.run.rank.worker import Worker
from penstock.engine.stage.stage import Stage
from penstock.engine.transport.rendezvous import Rendezvous
from penstock.training.checkpoint.agreeing import met
from penstock.training.checkpoint.folder import as_path
from penstock.training.checkpoint.piece import apart, flush, join_files, write_tensors

_METADATA = {"format": "pt"}
_ALONE = "model.safetensors"
_PARTS = ".model-*-of-*.part"
_MOST_ALONE_BYTES = 5 * 10**9
"""Of one file; larger models are left in the files of their stages. transformers took as much
before release 5, and takes ten times as much since; but here one rank puts the file together, from
what others have written, while they wait."""


class _PretrainedFiles(NamedTuple):
    """The names of a folder's files, and the keys in them.

    Attributes:
        files: the name of each stage's, of those that have anything; parts of one file, if there
            is to be one.
        keys: what is in them.
        num_bytes, num_numbers: of all of them.
    """

    files: Mapping[int, str]
    keys: Mapping[int, Sequence[str]]
    num_bytes: int
    num_numbers: int

    @property
    def is_alone(self) -> bool:
        """Whether all is to be in one file."""
        return len(self.files) == 1 or self.num_bytes <= _MOST_ALONE_BYTES

    @property
    def seen(self) -> set[str]:
        """The names of the files that are there in the end."""
        return {_ALONE} if self.is_alone else {*self.files.values()}


def save_pretrained(parts: Assembly, model: nn.Module, path: object) -> None:
    """Write the weights of a pipeline; all processes must call it, and nothing may run meanwhile.

    Args:
        parts: the pipeline.
        model: what it trains.
        path: the folder, the same on all ranks.

    Raises:
        InputError: processes have parts of layers, or layers have what such files have not.
        FileError: the folder has files of another model, or one cannot be written.
        PeerError, DeadlineError: another rank failed or did not come.
    """
    with met(parts, "writing weights") as meeting:
        _save(parts, model, as_path(path), meeting)


def _save(parts: Assembly, model: nn.Module, folder: Path, meeting: Rendezvous | None) -> None:
    if parts.in_processes and parts.plan.num_tensor_ranks > 1:
        raise InputError(
            "tensor ranks each have parts of layers, of which such files have whole ones; write "
            "what gather_state_dict(rank=0) gives with the model's own save_pretrained"
        )

    def meet(asked: str) -> None:
        if meeting is not None:
            meeting.exchange(None, NoneType, asked)

    is_first = meeting is None or meeting.rank == 0
    contents = _contents(parts, model)
    if is_first:
        _clear(folder, contents)
    meet("to write weights")  # before anybody writes into what rank 0 refuses
    for worker, stage in _held(parts):
        if stage.index in contents.files:
            _write(folder, contents, parts, worker, stage)
    meet("to have written its weights")
    if is_first:
        _finish(folder, contents, getattr(model, "original", model))
    meet("to see all weights written")


def _contents(parts: Assembly, model: nn.Module) -> _PretrainedFiles:
    """Which stage writes what: of a tied weight the first stage that has it under the name that
    comes first in the model, under which transformers looks for it."""
    layers = spine_of(model)
    sizes = [len(stage.layers) for stage in parts.plan.stages]
    spans = pairwise(accumulate(sizes, initial=0))
    tensors = [dict(_all_places(layers[start:stop])) for start, stop in spans]
    every = {key: tensor for own in tensors for key, tensor in own.items()}
    names = names_by_tensor(getattr(model, "original", model), every)
    first = {next(name for name in own if name in every) for own in names.values()}
    keys: dict[int, list[str]] = {}
    for stage, own in enumerate(tensors):
        mine = [key for key in own if key in first]
        first -= {*mine}
        if mine:
            keys[stage] = mine
    written = [every[key] for own in keys.values() for key in own]
    num_bytes = sum(tensor.nbytes for tensor in written)
    named = "model-{:05d}-of-{:05d}.safetensors"
    if num_bytes <= _MOST_ALONE_BYTES:
        named = _PARTS.replace("*", "{:05d}")
    files = {
        stage: _ALONE if len(keys) == 1 else named.format(number, len(keys))
        for number, stage in enumerate(keys, start=1)
    }
    return _PretrainedFiles(files, keys, num_bytes, sum(tensor.numel() for tensor in written))


def _all_places(layers: Sequence[NamedLayer]) -> Iterator[tuple[str, Tensor]]:
    for layer in layers:
        yield from places(layer)


def _clear(folder: Path, contents: _PretrainedFiles) -> None:
    """See that nobody will take older files for these, and that nothing is complete before all
    are."""
    own = contents.seen
    for pattern in (_ALONE, "model-*-of-*.safetensors"):
        for other in sorted(folder.glob(pattern)):
            if other.name not in own:
                raise FileError(
                    f"{folder} has {other.name} of another save, which would be read beside these "
                    "files or instead of them; remove it, or give an empty folder"
                )
    try:
        (folder / INDEX).unlink(missing_ok=True)
        for part in folder.glob(_PARTS):  # of a save that did not end
            part.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"cannot write {folder / INDEX}: {error.strerror}") from None


def _held(parts: Assembly) -> Iterator[tuple[Worker, Stage]]:
    """The stages that this process writes, with who has them: of copies, the first rank's."""
    for worker in parts.workers:
        for index, stage in worker.stages.items():
            assert isinstance(stage, Stage)
            if stage.has_rows:
                raise InputError(
                    "copies have rows of this stage's weights, and transformers' files have whole "
                    "ones; save a checkpoint with pipeline.save(…), or take gather_state_dict()"
                )
            is_first = worker.rank == min(parts.plan.placement.ranks_of(index))
            if is_first and not worker.seat.coordinate:
                yield worker, stage


def _write(
    folder: Path, contents: _PretrainedFiles, parts: Assembly, worker: Worker, stage: Stage
) -> None:
    index = stage.index
    with worker.visiting(index):
        # Threads that share layers have put their parts back into the model.
        shares = parts.layout.sharings is not None
        state = parts.layout.own_state(index) if shares else stage.state_dict()
        known = {key for layer in stage.layers for key, _ in places(layer)}
        others = sorted(state.keys() - known)
        if others:
            raise InputError(
                f"{others[0]!r} is neither parameter nor buffer, so transformers' files have no "
                "room for it; save a checkpoint with pipeline.save(…)"
            )
        tensors = apart({key: state[key] for key in contents.keys[index]})
        write_tensors(folder / contents.files[index], tensors, _METADATA)
        del state, tensors  # nothing may see a stage when it leaves


def _finish(folder: Path, contents: _PretrainedFiles, model: nn.Module) -> None:
    """Write what says how the files belong together, and what makes a model of them."""
    for name in contents.files.values():
        if not (folder / name).is_file():
            raise FileError(
                f"rank 0 does not see {name} in {folder}, which another rank has written; give a "
                "folder that all hosts see"
            )
    _write_configs(folder, model)
    if contents.is_alone:
        if len(contents.files) > 1:
            parts = [folder / name for name in contents.files.values()]
            join_files(parts, folder / _ALONE, _METADATA)
        return
    places = {key: contents.files[stage] for stage, own in contents.keys.items() for key in own}
    sizes = {"total_parameters": contents.num_numbers, "total_size": contents.num_bytes}
    text = msgspec.json.encode(Index(dict(sorted(places.items())), sizes))
    write_atomically(folder / INDEX, msgspec.json.format(text, indent=2) + b"\n")
    flush(folder / INDEX)


def _write_configs(folder: Path, model: nn.Module) -> None:
    """As transformers does beside weights; nothing for other models."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    written = copy.deepcopy(config)
    written.architectures = [type(model).__name__]
    # Whoever loads the weights makes them of the type that is written here.
    written.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    written.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(folder)
