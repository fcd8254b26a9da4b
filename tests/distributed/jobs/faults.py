"""Many faults, one after the other, each in a new Pipeline over the same process group.

    torchrun ... faults.py TRANSPORT SEED MOST FOLDER
    torchrun ... faults.py TRANSPORT kill VICTIM FOLDER

Each rank reports how each fault ended for it: ``report-<rank>.json``.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

import penstock as pk
from penstock.base.errors import PenstockError
from penstock.core.schedule import families
from tests.kit.helpers import make_batch, make_mlp, make_plan

DEADLINE_SECONDS = 6.0
LONG_SECONDS = 350.0
"""A deadline that must not pass."""

STALL_SECONDS = 2 * DEADLINE_SECONDS
NUM_MICROBATCHES = 4
NUM_STEPS = 3
FAMILIES = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v")
UPDATES: dict[str, dict] = {
    "plain": {},
    "clip": {"clip_norm": 1.0},
    "post-validate": {"clip_norm": 1.0, "post_validate": True},
}
RAISING = ("forward", "backward", "loss", "metric", "optimizer", "lr_scheduler", "nan")
MISUSES = ("loader ends", "loader raises", "closes early", "evaluates", "fewer microbatches")


class Fault(NamedTuple):
    """What goes wrong, on which rank, in which step, after how many calls of user code there."""

    kind: str
    how: str
    family: str
    update: str
    many: bool
    victim: int
    step: int
    call: int


def faults_of(seed: int, num_ranks: int, most: int = 100) -> list[Fault]:
    """At most one of every kind, the rest by chance; the same on every rank."""
    chance = random.Random(seed)
    kinds = [*((kind, "plainly") for kind in RAISING), *((kind, "") for kind in MISUSES)]
    kinds += [("forward", "at length"), ("forward", "without words"), ("backward", "stalls")]
    chance.shuffle(kinds)
    kinds = kinds[:most]
    found = []
    for kind, how in kinds:
        family = chance.choice(FAMILIES)
        stages_of = families.build(family, num_ranks=num_ranks, num_microbatches=8).stages_of
        last = max(range(num_ranks), key=lambda rank: max(stages_of[rank]))
        victim = last if kind in ("loss", "metric", "nan") else chance.randrange(num_ranks)
        step = chance.randrange(NUM_STEPS)
        if kind in ("optimizer", "lr_scheduler"):
            # The first stage is sure to train something.
            victim, call = next(r for r, own in enumerate(stages_of) if 0 in own), step
        else:
            call = NUM_MICROBATCHES * step + chance.randrange(NUM_MICROBATCHES)
        update, many = chance.choice([*UPDATES]), chance.random() < 0.5
        found.append(Fault(kind, how, family, update, many, victim, step, call))
    return found


class Unspeakable(Exception):
    """An exception whose text fails, and that cannot be pickled."""

    def __init__(self):
        self.lock = threading.Lock()

    def __str__(self):
        raise RuntimeError("no words")


ACTS = {
    "plainly": ValueError("boom"),
    "at length": ValueError("boom" + 100_000 * "!"),
    "without words": Unspeakable(),
}


class Culprit:
    """Does what a fault says, on its rank, in user code."""

    def __init__(self, fault: Fault, rank: int) -> None:
        self.fault, self.mine = fault, rank == fault.victim
        self.armed = False
        self._calls = itertools.count()

    def strikes(self, kind: str) -> bool:
        fault = self.fault
        if not self.mine or not self.armed or kind != fault.kind:
            return False
        return next(self._calls) == fault.call

    def call(self, kind: str) -> None:
        if self.strikes(kind):
            if self.fault.how == "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.fault.how == "stalls":
                time.sleep(STALL_SECONDS)
            else:
                raise ACTS[self.fault.how]

    def plant(self, pipeline: pk.Pipeline) -> None:
        for stage in pipeline.stages.values():
            layer = stage.layers[0].module
            layer.register_forward_pre_hook(lambda *_: self.call("forward"))
            layer.register_forward_hook(self._hook_output)
            return

    def _hook_output(self, module, args, output):
        if output.requires_grad:
            output.register_hook(lambda _: self.call("backward"))

    def loss(self, outputs, targets):
        self.call("loss")
        value = F.cross_entropy(outputs, targets)
        return value * float("nan") if self.strikes("nan") else value

    def metric(self, outputs, targets):
        self.call("metric")
        return 1.0

    def optimizer(self, parameters):
        culprit = self

        class Optimizer(torch.optim.SGD):
            def step(self, closure=None):
                culprit.call("optimizer")
                return super().step(closure)

        return Optimizer(parameters, lr=0.1)

    def lr_scheduler(self, optimizer):
        def factor(epoch):
            if epoch:
                self.call("lr_scheduler")
            return 1.0

        return LambdaLR(optimizer, factor)


def batches(fault: Fault, mine: bool):
    for step in range(NUM_STEPS):
        if mine and step == fault.step:
            if fault.kind == "loader ends":
                return
            if fault.kind == "loader raises":
                raise OSError("disk gone")
            if fault.kind == "fewer microbatches":
                yield make_batch(2, seed=step)
                continue
        yield make_batch(8, seed=step)


def train(pipeline: pk.Pipeline, fault: Fault, culprit: Culprit) -> None:
    mine = culprit.mine
    source = batches(fault, mine)
    if fault.many and fault.kind not in ("evaluates", "closes early"):
        # With steps(), a step's batch is fetched while the one before is under way.
        for _ in pipeline.steps(source):
            pass
        return
    for step, batch in enumerate(source):
        if mine and step == fault.step and fault.kind == "closes early":
            return
        if mine and step == fault.step and fault.kind == "evaluates":
            pipeline.evaluate(batch[0])
        else:
            pipeline.step(*batch)


def outcome_of(fault: Fault, transport: str) -> dict:
    """How one fault ends for this rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    culprit = Culprit(fault, rank)
    model = make_mlp()
    plan = make_plan(model, num_ranks, NUM_MICROBATCHES, fault.family)
    report = {"kind": "", "message": "", "notes": [], "again": ""}
    pipeline = pk.Pipeline(
        model,
        plan,
        loss=culprit.loss,
        optimizer=culprit.optimizer,
        lr_scheduler=culprit.lr_scheduler,
        metrics={"one": culprit.metric},
        transport=transport,
        deadline_seconds=LONG_SECONDS if fault.how == "kills" else DEADLINE_SECONDS,
        startup_seconds=LONG_SECONDS,
        seed=3,
        **UPDATES[fault.update],
    )
    culprit.plant(pipeline)
    # The first step of each kind may take longer; only then do the others' deadlines hold.
    pipeline.step(*make_batch(8))
    pipeline.evaluate(make_batch(8)[0])
    dist.barrier()  # or who is done fails while others still evaluate
    culprit.armed = True
    start = time.monotonic()
    try:
        with pipeline:
            try:
                train(pipeline, fault, culprit)
            except PenstockError:
                try:
                    pipeline.step(*make_batch(8))
                except PenstockError as again:
                    report["again"] = str(again)
                report["dump"] = pipeline.dump()
                raise
    except Exception as error:
        report["kind"] = type(error).__name__
        report["message"] = str(error)[:5000]
        report["notes"] = getattr(error, "__notes__", [])
    report["seconds"] = time.monotonic() - start
    return report


def num_open() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    # torchrun ends the survivors of a failed job by this signal; here they must end by themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    transport, seed, most, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[-1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if transport == "two hosts":
        name = f"host {rank // 2}"
        socket.gethostname = lambda: name
        transport = "auto"
    if seed == "kill":
        fault = Fault("backward", "kills", "zb-h1", "clip", True, most, 1, NUM_MICROBATCHES + 1)
        report = {"faults": [outcome_of(fault, transport)]}
        (folder / f"report-{rank}.json").write_text(json.dumps(report))
        os._exit(1)
    reports, opened = [], []
    for fault in faults_of(int(seed), dist.get_world_size(), most):
        reports.append(outcome_of(fault, transport))
        dist.barrier()
        opened.append(num_open())
    left = [name for name in os.listdir("/dev/shm") if "penstock" in name]
    report = {"faults": reports, "open": opened, "left": left, "threads": threading.active_count()}
    (folder / f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
