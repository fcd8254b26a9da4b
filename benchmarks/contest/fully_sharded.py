"""Fully sharded data parallelism beside torch's FSDP2 alone: seconds of a step, and bytes per rank.

    python -m benchmarks.contest.fully_sharded [--width 1024 --layers 11] [--rounds 15]

Two processes of one thread each train the same GPT (141 M parameters with the sizes above; 3 M by
default, to see that it runs), with a microbatch each. torch's ``fully_shard`` has a unit for each
layer and frees it behind each use; so does the reducer "fully-sharded" with gathered_for="use".
They take turns, A B A B, in the same processes. Before, both make the same steps, and the losses
must be those of the other.

Bytes are the peak of a step by torch's trackers of storages (``FSDPMemTracker``, and ``MemTracker``
for what is no module of torch's), in one step of its own. The goals are .97 of FSDP2's speed, and
no more memory than its.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.common.turns import Contest, measure_in_turns
from penstock.demo.gpt import GPT, loss
from penstock.engine.model.spine import spine_fingerprint, spine_of
from penstock.planning.plans import Plan, StagePlan

COPIES = 2
MIB = 2**20
GOAL_SPEED = 0.97


class Sizes(NamedTuple):
    """What is trained: ``rows`` of a copy's microbatch."""

    width: int
    layers: int
    vocabulary: int
    length: int
    rows: int
    bf16: bool

    def model(self) -> GPT:
        """The same on every rank."""
        torch.manual_seed(0)
        model = GPT(
            vocabulary=self.vocabulary, width=self.width, heads=max(1, self.width // 64),
            layers=self.layers, context=self.length,
        )  # fmt: skip
        return model.bfloat16() if self.bf16 else model

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and targets of all copies."""
        generator = torch.Generator().manual_seed(1)
        shape = 2, COPIES * self.rows, self.length
        tokens = torch.randint(0, self.vocabulary, shape, generator=generator)
        return tokens[0], tokens[1]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of both."""
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=False)


class TorchAlone:
    """What a user of ``fully_shard`` writes, a unit for each layer."""

    def __init__(self, sizes: Sizes, rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.model: Any = sizes.model()
        policy = MixedPrecisionPolicy()
        if sizes.bf16:  # rows are the masters
            self.model = self.model.float()
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        mesh = init_device_mesh("cpu", (COPIES,))
        for layer in self.model.spine():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = adamw(self.model.parameters())
        self._own = [part.chunk(COPIES)[rank] for part in sizes.batch()]

    def step(self) -> Tensor:
        """One update; this copy's loss."""
        self.optimizer.zero_grad()
        value = loss(self.model(self._own[0]), self._own[1])
        value.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return value.detach()

    def peak_bytes(self) -> int:
        """Of a step."""
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

        tracker = FSDPMemTracker(self.model, self.optimizer)
        tracker.track_inputs(tuple(self._own))
        with tracker:
            self.step()
        return _peak(tracker)


class Sharded:
    """The reducer "fully-sharded" with a pipeline of one stage."""

    def __init__(self, sizes: Sizes) -> None:
        model = sizes.model()
        layers = spine_of(model)
        names = tuple(layer.name for layer in layers)
        plan = Plan(
            model=spine_fingerprint(layers), schedule="1f1b", options={"replicas": [COPIES]},
            num_microbatches=COPIES, num_threads=1, stages=(StagePlan(layers=names, rank=0),),
        ).with_reducer("fully-sharded", gathered_for="use")  # fmt: skip
        make = pk.optimizers.master_weights(adamw) if sizes.bf16 else adamw
        self.pipeline = pk.Pipeline(
            model, plan, loss=loss, optimizer=make, record=False, deadline_seconds=300
        )
        self._model = model
        self._batch = sizes.batch()

    def step(self) -> Tensor:
        """One update; the loss of the minibatch."""
        return self.pipeline.step(*self._batch)

    def peak_bytes(self) -> int:
        """Of a step."""
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        rows = [own.to_local() for own in self._model.parameters()]  # type: ignore[attr-defined]
        state = self.pipeline.optimizers.state.values()
        kept = [value for own in state for value in own.values() if isinstance(value, Tensor)]
        tracker.track_external(*rows, *kept)
        with tracker:
            self.step()
        return _peak(tracker)


def _peak(tracker: Any) -> int:
    snapshot = tracker.get_tracker_snapshot("peak")
    return int(sum(sizes["Total"] for sizes in snapshot.values()))


def on_one_rank(sizes: Sizes, rounds: int) -> None:
    """What each process does; rank 0 prints the numbers of both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    theirs, ours = TorchAlone(sizes, rank), Sharded(sizes)
    for step in range(3):
        value = theirs.step()
        dist.all_reduce(value)
        mine = ours.step()
        if rank == 0 and abs(mine - value / COPIES) > (0.05 if sizes.bf16 else 1e-4):
            sys.exit(f"step {step}: losses are {mine:g} and {value / COPIES:g}")
    peaks = torch.tensor([theirs.peak_bytes(), ours.peak_bytes()])
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    contests = {
        "torch FSDP2": Contest(theirs.step, 1),
        "Penstock fully-sharded": Contest(partial(_quiet, ours.step), 1),
    }
    measured = measure_in_turns(contests, rounds)
    if rank == 0:
        count = sum(own.numel() for own in sizes.model().parameters())
        found = {name: [*own] for name, own in measured.items()}
        print("NUMBERS " + json.dumps([count, found, peaks.tolist()]), flush=True)
    ours.pipeline.close()
    dist.barrier()
    dist.destroy_process_group()


def _quiet(step: Callable[[], object]) -> None:
    step()


def in_processes_of_its_own(words: Sequence[str]) -> tuple[int, dict[str, list[float]], list[int]]:
    """(parameters, seconds and processor seconds of each, peak bytes of each)."""
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={COPIES}", "-m", "benchmarks.contest.fully_sharded"),
            *("--job", *words),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = next(line for line in ran.stdout.splitlines() if line.startswith("NUMBERS "))
    count, seconds, peaks = json.loads(line.removeprefix("NUMBERS "))
    return count, seconds, peaks


def show(words: Sequence[str]) -> None:
    """A line for each contestant, and the ratios that are the goals."""
    count, seconds, peaks = in_processes_of_its_own(words)
    print(f"{count / 1e6:.1f} M parameters on {COPIES} copies, a microbatch each")
    print(f"{'':24} {'seconds':>8} {'processor':>9} {'MiB':>8}")
    for (name, (wall, processor)), peak in zip(seconds.items(), peaks, strict=True):
        print(f"{name:24} {wall:8.3f} {processor:9.3f} {peak / MIB:8.1f}")
    (their_wall, their_cpu), (our_wall, our_cpu) = seconds.values()
    print(
        f"speed {their_wall / our_wall:.3f} of FSDP2's (goal {GOAL_SPEED}), processor time "
        f"{our_cpu / their_cpu:.3f}, memory {peaks[1] / peaks[0]:.3f} (goal 1)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2, help="of a copy's microbatch")
    parser.add_argument("--bf16", action="store_true", help="with masters in float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        sizes = {name: getattr(options, name) for name in Sizes._fields}
        on_one_rank(Sizes(**sizes), options.rounds)
    else:
        show(sys.argv[1:])


if __name__ == "__main__":
    publish(main)
