"""Checkpoints beside torch's own ways to write the same state, in turns, in one process.

    python -m benchmarks.saving.checkpoints [--megabytes 144] [--rounds 5] [--folder /tmp]

The state is that of AdamW: weights and two averages. Ways take turns, so all meet the same disk;
figures are medians, and ratios medians of the rounds' ratios. All that write wait for the disk
(fsync); reading is from the page cache. Columns:

held up   how long training waits: the whole writing, or the copying where a thread writes
written   until the files are on the disk
loaded    into a model and an optimizer that are there already
÷ memcpy  held up, beside one copy of the state into memory that was used before
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import penstock as pk
from benchmarks.common.alone import publish
from penstock.cli.show import print_table

_WIDTH = 1000


class Took(NamedTuple):
    """Seconds of one way in one round; ``None`` where it does not do that."""

    held_up: float | None = None
    written: float | None = None
    loaded: float | None = None


Way = Callable[[Path], Took]


def seconds_of(work: Callable[[], object]) -> float:
    """How long something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def pipeline_of(megabytes: float) -> Iterator[pk.Pipeline]:
    """Two stages in threads that have trained one step; with AdamW their state has this size."""
    num_layers = max(2, round(megabytes * 1e6 / 12 / _WIDTH**2))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers)))
    inputs = torch.randn(4, _WIDTH)
    plan = pk.plan(pk.profile(model, inputs[:2]), pk.Cluster.local(2), microbatches=2, stages=2)
    with pk.Pipeline(
        model, plan, loss=nn.functional.mse_loss, optimizer=torch.optim.AdamW
    ) as pipeline:
        pipeline.step(inputs, inputs)
        yield pipeline


def state_of(pipeline: pk.Pipeline) -> dict[str, Tensor]:
    """All that is saved, as torch's own ways take it."""
    state = dict(pipeline.state_dict())
    for worker in pipeline._parts.workers:
        for stage, optimizer in worker.updater.optimizers.items():
            for name, parameter in worker.updater.holdings[stage].named.items():
                for key, value in optimizer.state[parameter].items():
                    state[f"state.{name}.{key}"] = value
    return state


def ways_of(pipeline: pk.Pipeline, state: dict[str, Tensor]) -> dict[str, Way]:
    """Every way to save, by name."""
    copies = {name: value.clone() for name, value in state.items()}
    into = {name: torch.empty_like(value) for name, value in state.items()}

    def memcpy(folder: Path) -> Took:
        return Took(
            seconds_of(lambda: [copies[name].copy_(value) for name, value in state.items()])
        )

    def background(folder: Path) -> Took:
        start = time.perf_counter()
        pipeline.save(folder)
        held_up = time.perf_counter() - start
        pipeline._keeper._saver.wait()
        return Took(held_up, time.perf_counter() - start)

    def foreground(folder: Path) -> Took:
        written = seconds_of(lambda: pipeline.save(folder, background=False))
        return Took(written, written, seconds_of(lambda: pipeline.load(folder)))

    def dcp(folder: Path) -> Took:
        written = seconds_of(
            lambda: save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        )
        reading = FileSystemReader(folder)
        return Took(
            written, written, seconds_of(lambda: load(into, storage_reader=reading, no_dist=True))
        )

    def dcp_background(folder: Path) -> Took:
        start = time.perf_counter()
        writing = async_save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        held_up = time.perf_counter() - start
        writing.result()
        return Took(held_up, time.perf_counter() - start)

    def dcp_safetensors(folder: Path) -> Took:
        files = {name: 1 + index % 2 for index, name in enumerate(state)}
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files)
        written = seconds_of(
            lambda: (save(state, storage_writer=writer, no_dist=True), sync(folder))
        )
        reading = HuggingFaceStorageReader(str(folder))
        return Took(
            written, written, seconds_of(lambda: load(into, storage_reader=reading, no_dist=True))
        )

    def torch_save(folder: Path) -> Took:
        folder.mkdir()
        path = folder / "state.pt"
        written = seconds_of(lambda: (torch.save(state, path), sync(folder)))

        def read() -> None:
            there = torch.load(path, weights_only=True)
            for name, value in into.items():
                value.copy_(there[name])

        return Took(written, written, seconds_of(read))

    return {
        "memcpy": memcpy,
        "Penstock, in the background": background,
        "torch.distributed.checkpoint, async_save": dcp_background,
        "Penstock": foreground,
        "torch.distributed.checkpoint": dcp,
        "torch.distributed.checkpoint, safetensors": dcp_safetensors,
        "torch.save": torch_save,
    }


def sync(folder: Path) -> None:
    """Wait for the disk."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def measured(ways: dict[str, Way], rounds: int, folder: Path) -> dict[str, list[Took]]:
    """Every way, in turns; a first round warms up."""
    took: dict[str, list[Took]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            os.sync()
            target = folder / f"{number}"
            one = way(target)
            shutil.rmtree(target, ignore_errors=True)
            if number:
                took[name].append(one)
    return took


def shown(values: list[float | None], form: str = "{:.3f} s") -> str:
    """The median of what was measured."""
    there = [value for value in values if value is not None]
    return form.format(statistics.median(there)) if there else ""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=144.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk that is meant; by default /tmp")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        pipeline_of(options.megabytes) as pipeline,
    ):
        state = state_of(pipeline)
        took = measured(ways_of(pipeline, state), options.rounds, Path(folder))
    size = sum(value.nbytes for value in state.values())
    print(f"{size / 1e6:.0f} MB in {len(state)} tensors, medians of {options.rounds} rounds")
    copying = [one.held_up or 0.0 for one in took["memcpy"]]
    rows = []
    for name, own in took.items():
        ratios = [(one.held_up or 0.0) / copy for one, copy in zip(own, copying, strict=True)]
        columns = ([one[index] for one in own] for index in range(3))
        rows.append([name, *map(shown, columns), shown([*ratios], "{:.2f}")])
    print_table(("way", "held up", "written", "loaded", "÷ memcpy"), rows)


if __name__ == "__main__":
    publish(main)
