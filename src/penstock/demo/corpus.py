"""The demo's workload: a small GPT, and real text without a download, the source code of Python's
own standard library.

Every machine that runs Penstock has it, several megabytes of it. It is read when asked for, in
sorted order, so the same Python gives the same bytes, batches and losses.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.demo.gpt import GPT, loss
from penstock.trial import Workload

_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
"""Folders of installed packages, of tests, and of tables that programs wrote: windows of those are
so unlike all others that a step with many of them makes the loss jump."""
_HELD_OUT_EVERY = 10


class Corpus:
    """Bytes to learn to predict, some files of them held out.

    Every tenth file in sorted order, from the first, is held out; no file is in both parts.

    Args:
        files: names and contents; at least two.

    Attributes:
        training_files: names of the files to train on, sorted.
        held_out_files: names of the others, sorted.
        training: ``uint8[num_bytes]``, the training files joined by newlines.
        held_out_text: ``uint8[num_bytes]``, the same of the held-out files.

    Raises:
        InputError: fewer than two files.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        if len(files) < 2:
            raise InputError(
                f"a corpus needs at least 2 files, one of them held out, but has {len(files)}"
            )
        names = sorted(files)
        self.held_out_files = tuple(names[::_HELD_OUT_EVERY])
        self.training_files = tuple(name for name in names if name not in self.held_out_files)
        self.training = _joined(files[name] for name in self.training_files)
        self.held_out_text = _joined(files[name] for name in self.held_out_files)

    @classmethod
    def standard_library(cls, folder: str | Path | None = None) -> Self:
        """The ``.py`` files of this Python's standard library, without its tests and its tables of
        character sets.

        Args:
            folder: another folder of Python sources to read instead.

        Raises:
            InputError: it holds fewer than two non-empty sources, as where Python lives in a zip.
        """
        root = Path(sysconfig.get_paths()["stdlib"] if folder is None else folder)
        files = {path.relative_to(root).as_posix(): path.read_bytes() for path in _sources(root)}
        files = {name: content for name, content in files.items() if content.strip()}
        if len(files) < 2:
            raise InputError(
                f"found {len(files)} non-empty Python sources in {root}, but need at least 2; name "
                "a folder of .py files: Corpus.standard_library(folder)"
            )
        return cls(files)

    def batches(self, rows: int, context: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless random windows of the training text; the same seed gives the same windows.

        Yields:
            inputs and targets, each ``int64[rows, context]``; targets are one byte ahead.

        Raises:
            InputError: a size is below 1, or the text is shorter than one window.
        """
        last = _last_start(self.training, rows, context)
        return self._batches(rows, context, last, torch.Generator().manual_seed(seed))

    def held_out(self, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """Give windows evenly spread over the held-out text, always the same.

        Returns:
            inputs and targets, each ``int64[rows, context]``; targets are one byte ahead.

        Raises:
            InputError: a size is below 1, or the text is shorter than one window.
        """
        last = _last_start(self.held_out_text, rows, context)
        starts = torch.arange(rows) * last // max(1, rows - 1)
        return _windows(self.held_out_text, starts, context)

    def _batches(
        self, rows: int, context: int, last: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            starts = torch.randint(last + 1, (rows,), generator=generator)
            yield _windows(self.training, starts, context)


def _sources(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        yield from (path for path in paths if path.is_file())


def _joined(contents: Iterator[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(contents)), dtype=torch.uint8)


def _last_start(text: Tensor, rows: int, context: int) -> int:
    if rows < 1 or context < 1:
        raise InputError(f"rows and context must be ≥ 1, but are {rows} and {context}")
    last = len(text) - context - 1
    if last < 0:
        raise InputError(
            f"a window of context {context} needs {context + 1} bytes, but the text has "
            f"{len(text)}; choose a smaller context"
        )
    return last


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    offsets = torch.arange(context)
    places = starts[:, None] + offsets
    return text[places].long(), text[places + 1].long()


ROWS = 16
CONTEXT = 48
MICROBATCHES = 8
SMALL = {"width": 128, "heads": 4, "layers": 4}


def build_model() -> nn.Module:
    """Build the GPT, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(context=CONTEXT)


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make AdamW in its fused form, which takes a third of the plain one's time on a CPU."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), fused=True)


def build_small_model() -> nn.Module:
    """Build a GPT of 0.9 M parameters, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(context=CONTEXT, **SMALL)


def small_workload() -> Workload:
    """A GPT of 0.9 M parameters on the text of ``workload``, which learns something in a minute."""
    return replace(workload(), build_model=build_small_model, name="small byte-level GPT")


def workload() -> Workload:
    """A byte-level GPT of 10 M parameters on the source code of Python's standard library."""
    corpus = Corpus.standard_library()
    megabytes = (len(corpus.training) + len(corpus.held_out_text)) / 1e6
    count = len(corpus.training_files) + len(corpus.held_out_files)
    return Workload(
        build_model=build_model,
        loss=loss,
        optimizer=build_optimizer,
        batches=lambda: corpus.batches(ROWS, CONTEXT),
        held_out=corpus.held_out(32, CONTEXT),
        name="byte-level GPT",
        unit="token",
        notes=f"{megabytes:.1f} MB of source code from {count} files of Python "
        f"{sys.version_info.major}.{sys.version_info.minor}'s standard library",
    )
