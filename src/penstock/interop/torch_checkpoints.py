"""A pipeline's weights in folders of ``torch.distributed.checkpoint``, as torchtitan and others
keep them: under the names that parameters have in the whole model.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from penstock.base.errors import FileError
from penstock.base.values import expect
from penstock.training.pipeline import Pipeline

_METADATA = ".metadata"


def save_dcp(pipeline: Pipeline, folder: str | os.PathLike[str], *, under: str = "") -> None:
    """Write a pipeline's parameters and buffers for ``torch.distributed.checkpoint``.

    Under ``torchrun`` every process writes its own stages, and all must call it, between steps.
    Optimizers are not part of it: ``penstock checkpoint export --to dcp`` writes both from what
    ``pipeline.save`` has written.

    Args:
        folder: what is written; the same on all ranks. It may be there, and what is in it with it.
        under: the key under which a program keeps the model beside other things: with ``"model"``,
            weights are called ``model.layers.0.weight`` and so on. torchtitan has none.

    Raises:
        InputError: stages have different numbers of copies or of tensor ranks.
        FileError: it cannot be written.
        PeerError, DeadlineError: another process did not call it.
    """
    state = _named(pipeline.dtensor_state_dict(), under)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process is what no_dist says
            save(state, checkpoint_id=os.fspath(folder), no_dist=not _is_spread(state))
    except OSError as error:
        raise FileError(f"cannot write {folder}: {error.strerror or error}") from None


def load_dcp(pipeline: Pipeline, folder: str | os.PathLike[str], *, under: str = "") -> None:
    """Take a pipeline's parameters and buffers from a folder of ``torch.distributed.checkpoint``,
    whoever has written it and however it was spread.

    Such a folder has a pickled file in it, which runs what whoever wrote it wants: load only what
    you trust. Under ``torchrun`` all processes must call it, between steps. Optimizers keep their
    state. What else is in the folder is left alone.

    Args:
        folder: what is read.
        under: the key under which the program that wrote it keeps the model, as for ``save_dcp``.

    Raises:
        FileError: there is no such folder, or it lacks a weight, or has it in another shape; no
            weight has changed then.
        PeerError, DeadlineError: another process did not call it.
    """
    expect(folder, str | os.PathLike, "the folder", "give its path")
    if not (Path(folder) / _METADATA).is_file():
        raise FileError(
            f"{folder} is no folder of torch.distributed.checkpoint: it has no file {_METADATA}"
        )
    own = pipeline.dtensor_state_dict()
    state = _named(own, under)
    _check_has(Path(folder), state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(state, checkpoint_id=os.fspath(folder), no_dist=not _is_spread(state))
    pipeline.load_dtensor_state_dict(
        {key: state[name] for key, name in zip(own, state, strict=True)}
    )


def _named(state: dict[str, Tensor], under: str) -> dict[str, Any]:
    expect(under, str, "under", "give the key of the model, as under='model'")
    return {f"{under}.{key}" if under else key: value for key, value in state.items()}


def _is_spread(state: dict[str, Any]) -> bool:
    """Whether each process has its own part."""
    return any(isinstance(value, DTensor) for value in state.values())


def _check_has(folder: Path, state: dict[str, Any]) -> None:
    there = FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, value in state.items():
        if name not in there:
            close = ", ".join(sorted(there)[:3])
            raise FileError(
                f"{folder} has no {name!r}; it has {close} and {max(len(there) - 3, 0)} more. Give "
                "under='…' if the model is kept under a key there, and build the model whose "
                "weights they are"
            )
        size = getattr(there[name], "size", None)
        if size is None or tuple(size) != tuple(value.shape):
            was = "no tensor" if size is None else f"of shape {tuple(size)}"
            raise FileError(
                f"{folder} has {name!r}, which is {was}, and the model has it of shape "
                f"{tuple(value.shape)}; build the model whose weights they are"
            )
