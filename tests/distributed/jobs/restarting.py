"""Training that goes on from its newest checkpoint, and meets what the test has asked for.

    restarting.py FOLDER STEPS [TROUBLE:RANK:STEP:ATTEMPTS]...

Ranks say in FOLDER that they are there, rank 0 also which losses it has seen. A trouble is met
before a step, in as many attempts as are given, from the first on. With ``ATTEMPTS`` in the
environment, each attempt but the last of so many waits after three steps for somebody to kill it.
With ``GATHERED_FOR``, all ranks are copies of one stage, whose weights are fully sharded.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import penstock as pk
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.reducing import replicated

SEED = 3


def main() -> None:
    folder, num_steps, troubles = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    said = folder / f"{attempt}-{rank}"
    said.with_suffix(".part").write_text(str(os.getpid()))
    said.with_suffix(".part").rename(said)  # nobody reads half a number
    torch.set_num_threads(1)
    with pipeline_of(int(os.environ["WORLD_SIZE"])) as pipeline:
        for step in range(pipeline.load(folder / "checkpoints") or 0, num_steps):
            for trouble in troubles:
                how, who, when, attempts = trouble.split(":")
                if (rank, step) == (int(who), int(when)) and attempt < int(attempts):
                    meet(how)
            train(pipeline, step, folder if rank == 0 else None)
            pipeline.save(folder / "checkpoints", keep=2)
            if attempt < int(os.environ.get("ATTEMPTS", "0")) - 1 and step >= 3 * attempt + 2:
                wait()


def pipeline_of(num_ranks: int, **options) -> pk.Pipeline:
    """What is trained, also by the test that compares losses."""
    model = make_mlp()
    plan, kept = make_plan(model, num_ranks, 4), os.environ.get("GATHERED_FOR")
    if kept is not None:
        plan = replicated(model, (num_ranks,), 6)
        if "transport" not in options:
            plan = plan.with_reducer("fully-sharded", gathered_for=kept)
    return pk.Pipeline(
        model,
        plan,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        seed=SEED,
        **options,
    )


def train(pipeline: pk.Pipeline, step: int, folder: Path | None) -> float:
    """Train on the minibatch of a step, and write its loss into a folder."""
    loss = pipeline.step(*make_batch(12, seed=step)).item()
    if folder is not None:
        with (folder / "losses").open("a") as losses:
            losses.write(json.dumps([step, loss]) + "\n")
    return loss


def meet(how: str) -> None:
    """Get into trouble."""
    print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} meets {how}")
    if how in signal.Signals.__members__:
        os.kill(os.getpid(), signal.Signals[how])
    if how == "raise":
        raise ValueError(f"no luck with {object()}")
    if how == "exit":
        os._exit(3)
    wait()


def wait() -> None:
    """Do nothing for ever. A signal that another thread is given wakes no long sleep."""
    while True:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
