"""Checkpoints for programs that know nothing of Penstock."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save

from penstock.base.errors import FileError
from penstock.training.checkpoint.contents import Contents
from penstock.training.checkpoint.division import OPTIMIZER
from penstock.training.checkpoint.folder import Checkpoint
from penstock.training.checkpoint.piece import write_tensors
from penstock.training.checkpoint.plain import of_json


def export_weights(checkpoint: Checkpoint, target: Path) -> None:
    """Write a checkpoint's weights and buffers as one safetensors file, under the keys of the
    model's ``state_dict``.

    Raises:
        FileError: it cannot be written.
    """
    contents = Contents(checkpoint)
    weights = {name: contents.tensor(name) for name in contents.weights}
    write_tensors(target, weights, {"format": "pt"})


def export_dcp(checkpoint: Checkpoint, target: Path) -> None:
    """Write a checkpoint as a folder of ``torch.distributed.checkpoint``: weights under the model's
    keys, the optimizer's as ``torch.distributed.checkpoint.state_dict`` flattens them
    (``state.<parameter>.<key>`` and ``param_groups.<parameter>.<option>``).

    Such a folder has a pickled file in it, which whoever reads it must trust.

    Raises:
        FileError: the folder cannot be written.
    """
    beside = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process is what no_dist says
            save(_flattened(checkpoint), checkpoint_id=beside, no_dist=True)
        os.replace(beside, target)
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _flattened(checkpoint: Checkpoint) -> dict[str, Any]:
    contents = Contents(checkpoint)
    flat: dict[str, Any] = {name: contents.tensor(name) for name in contents.weights}
    for name, told in contents.trainer_of.items():
        for key in contents.state_keys.get(name, ()):
            flat[f"state.{name}.{key}"] = contents.tensor(f"{OPTIMIZER}{name}/{key}")
        for key, value in contents.plain_state(name).items():
            flat[f"state.{name}.{key}"] = value
        for key, value in told.options[name].items():
            flat[f"param_groups.{name}.{key}"] = of_json(value)
    return flat
