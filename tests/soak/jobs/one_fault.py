"""One fault that chance draws, in a training of its own; every rank that can reports how it ended.

    torchrun ... one_fault.py SEED FOLDER

The same seed draws the same fault on every rank.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import penstock as pk
from tests.kit.helpers import make_batch, make_mlp, make_plan

DEADLINE_SECONDS = 8.0
STARTUP_SECONDS = 45.0
SLOW_SECONDS = 3.0
NUM_STEPS = 6
MEANS = (
    "kill",
    "stop",
    "raise",
    "exit",
    "slow",
    "loader ends",
    "wrong data",
    "full disk",
    "little memory",
)
MOMENTS = ("before the pipeline", "in the model", "in a step")


class Fault(NamedTuple):
    """What goes wrong, when, on which rank."""

    means: str
    moment: str
    step: int
    victim: int
    num_ranks: int
    transport: str
    schedule: str
    streams: bool

    @property
    def spares_others(self) -> bool:
        """Whether the training goes on."""
        return self.means in ("slow", "full disk")


def fault_of(seed: int) -> Fault:
    """The fault of a seed."""
    chance = random.Random(seed)
    means = MEANS[seed % len(MEANS)]
    early = means in ("kill", "stop", "raise", "exit", "slow")
    num_ranks = chance.choice((2, 3))
    return Fault(
        means=means,
        moment=chance.choice(MOMENTS) if early else "in a step",
        step=chance.randrange(1, NUM_STEPS),
        victim=chance.choice((0, num_ranks - 1))
        if means == "wrong data"
        else (chance.randrange(num_ranks)),
        num_ranks=num_ranks,
        transport=chance.choice(("auto", "process-group")),
        schedule=chance.choice(("1f1b", "gpipe", "zb-h1")),
        streams=chance.random() < 0.5,
    )


def act(fault: Fault, folder: Path) -> None:
    """Do what the fault says, to this process."""
    match fault.means:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            (folder / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ValueError("boom")
        case "exit":
            sys.exit(3)
        case "slow":
            time.sleep(SLOW_SECONDS)
        case "full disk":
            _fill(folder)
        case "little memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, resource.RLIM_INFINITY))
            torch.ones(2**26)


def _fill(folder: Path) -> None:
    """A plan that cannot be written whole leaves the file that was there as it was."""
    plan = make_plan(make_mlp(), 2, 4)
    path = folder / f"plan-{os.environ['RANK']}.json"
    plan.save(path)
    before, limits = path.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        plan.save(path)
    except pk.errors.FileError as error:
        assert str(path) in str(error), error
    else:
        raise AssertionError("a full disk was not noticed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == before
    assert [name for name in os.listdir(folder) if name.startswith(path.name)] == [path.name]


def batches(fault: Fault, mine: bool, folder: Path):
    for step in range(NUM_STEPS):
        strikes = mine and fault.moment == "in a step" and step == fault.step
        if strikes and fault.means == "loader ends":
            return
        if strikes and fault.means != "wrong data":
            act(fault, folder)
        wrong = strikes and fault.means == "wrong data"
        yield make_batch(8, seed=step + (100 if wrong else 0))


def train(fault: Fault, mine: bool, folder: Path) -> None:
    if mine and fault.moment == "before the pipeline":
        act(fault, folder)
    model = make_mlp()
    plan = make_plan(model, fault.num_ranks, 4, fault.schedule)
    if mine and fault.moment == "in the model":
        calls = itertools.count()  # of the layers that this rank has
        for module in model:
            module.register_forward_pre_hook(
                lambda *_: act(fault, folder) if next(calls) == fault.step else None
            )
    with pk.Pipeline(
        model,
        plan,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        transport=fault.transport,
        seed=0,
        deadline_seconds=DEADLINE_SECONDS,
        startup_seconds=STARTUP_SECONDS,
    ) as pipeline:
        source = batches(fault, mine, folder)
        if fault.streams:
            for _ in pipeline.steps(source):
                pass
        else:
            for batch in source:
                pipeline.step(*batch)


def main() -> None:
    # torchrun ends the survivors of a failed job by this signal; here they must end by themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fault, folder, rank = fault_of(int(sys.argv[1])), Path(sys.argv[-1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    start, report = time.monotonic(), {"kind": "", "message": ""}
    try:
        train(fault, rank == fault.victim, folder)
    except (Exception, SystemExit) as error:
        report = {"kind": type(error).__name__, "message": str(error)[:5000]}
    report["seconds"] = time.monotonic() - start
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    if (folder / "stopped").exists():
        os.kill(int((folder / "stopped").read_text()), signal.SIGKILL)


if __name__ == "__main__":
    main()
