"""How long training stands still when a rank is killed: ``penstock run`` beside torchrun.

    python -m benchmarks.contest.restarting [--ranks 4] [--kills 5]

The same script under both, one after the other, on the same machine: it builds a pipeline, loads
the newest checkpoint and trains, saving after each step. A rank is killed with SIGKILL; the table
has the medians of seconds from there to what follows, each until the last rank has come to it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.alone import publish

BEGUN = time.monotonic()

MODULE = "benchmarks.contest.restarting"
ATTEMPT, RANK = "TORCHELASTIC_RESTART_COUNT", "RANK"
NUM_STEPS = 5
"""Before a kill, and of the last attempt."""

LIMIT_SECONDS = 300.0

MOMENTS = {
    "noticed": "death noticed",
    "ended": "all other ranks ended",
    "forked": "all ranks forked",
    "begun": "script begins",
    "loading": "torch and penstock imported, model made",
    "built": "pipeline built",
    "loaded": "checkpoint loaded",
    "stepped": "first step done",
    "own": "the same without building and loading",
}


def main() -> None:
    """Be whatever of the benchmark this process is to be."""
    if RANK in os.environ:
        train(Path(sys.argv[1]), int(sys.argv[2]))
    elif sys.argv[1:2] == ["--supervise"]:
        be_supervisor(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        compare()


def train(folder: Path, num_kills: int) -> None:
    """The script: trains until it is killed, or for a few steps in the last attempt."""
    import torch
    from torch import nn

    import penstock as pk
    from benchmarks.contest.engine_cost import plan_of

    attempt, rank = int(os.environ[ATTEMPT]), os.environ[RANK]
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    plan = plan_of(model, "1f1b", int(os.environ["WORLD_SIZE"]), num_microbatches=8)
    moments = {"begun": BEGUN, "loading": time.monotonic()}
    with pk.Pipeline(
        model,
        plan,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW,
    ) as pipeline:
        moments["built"] = time.monotonic()
        start = pipeline.load(folder / "checkpoints") or 0
        moments["loaded"] = time.monotonic()
        end = time.monotonic() + LIMIT_SECONDS
        step = start
        while time.monotonic() < end and (attempt < num_kills or step < start + NUM_STEPS):
            inputs = torch.ones(16, 64)
            pipeline.step(inputs, inputs)
            moments.setdefault("stepped", time.monotonic())
            pipeline.save(folder / "checkpoints", keep=2)
            step += 1
            if step == start + NUM_STEPS:
                say(folder / f"{attempt}-{rank}", {**moments, "process": os.getpid()})


def say(path: Path, value: object) -> None:
    """Write a file that nobody sees half of."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


def be_supervisor(folder: Path, num_ranks: int, num_kills: int) -> None:
    """What ``penstock run`` does, and write down when."""
    from penstock.training.supervisor import Rank, Script, SupervisedJob, supervise

    script = Script(MODULE, (str(folder), str(num_kills)), is_module=True)
    outcome = supervise(SupervisedJob(script, num_ranks, num_kills), lambda text: None)
    if isinstance(outcome, Rank):
        script.run(outcome.number)
        return
    moments = [account.moments._asdict() for account in outcome.accounts]
    say(folder / "supervisor", moments)
    sys.exit(outcome.code)


def compare() -> None:
    """Kill ranks under both, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    numbers = str(arguments.ranks), str(arguments.kills)
    measured = {}
    with tempfile.TemporaryDirectory() as name:
        for title in ("penstock run", "torchrun"):
            folder = Path(name) / title.replace(" ", "-")
            folder.mkdir()
            command = {
                "penstock run": ("-m", MODULE, "--supervise", str(folder), *numbers),
                "torchrun": (
                    *("-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", numbers[0], "--max-restarts", numbers[1]),
                    *("-m", MODULE, str(folder), numbers[1]),
                ),
            }[title]
            measured[title] = measure(command, folder, arguments.ranks, arguments.kills)
    print(f"\n{arguments.ranks} ranks, {arguments.kills} kills; median seconds after SIGKILL\n")
    print(f"| | {' | '.join(measured)} |\n|---|{'---:|' * len(measured)}")
    for moment, title in MOMENTS.items():
        cells = (shown(seconds.get(moment)) for seconds in measured.values())
        print(f"| {title} | {' | '.join(cells)} |")


def measure(
    command: Sequence[str], folder: Path, num_ranks: int, num_kills: int
) -> dict[str, float]:
    """Median seconds from a kill to each moment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            kills = []
            for attempt in range(num_kills):
                ranks = reports(folder, attempt, num_ranks)
                kills.append(time.monotonic())
                os.kill(int(ranks[attempt % num_ranks]["process"]), signal.SIGKILL)
            after = [reports(folder, attempt, num_ranks) for attempt in range(1, num_kills + 1)]
            code = job.wait(LIMIT_SECONDS)
        finally:
            job.kill()
            job.wait()
    assert code == 0, (folder / "output").read_text()
    rows = [last_of(ranks, kill) for ranks, kill in zip(after, kills, strict=True)]
    if (folder / "supervisor").exists():
        told = json.loads((folder / "supervisor").read_text())
        for number, (row, kill) in enumerate(zip(rows, kills, strict=True)):
            row["noticed"] = told[number]["noticed"] - kill
            row["ended"] = told[number]["ended"] - kill
            row["forked"] = told[number + 1]["forked"] - kill
    return {moment: statistics.median(row[moment] for row in rows) for moment in rows[0]}


def reports(folder: Path, attempt: int, num_ranks: int) -> list[dict[str, float]]:
    """What all ranks of an attempt say, as soon as they do."""
    paths = [folder / f"{attempt}-{rank}" for rank in range(num_ranks)]
    end = time.monotonic() + LIMIT_SECONDS
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, (folder / "output").read_text()
        time.sleep(0.01)
    return [json.loads(path.read_text()) for path in paths]


def last_of(ranks: Sequence[Mapping[str, float]], kill: float) -> dict[str, float]:
    """Seconds from a kill until the last rank has come to each moment."""
    row = {
        moment: max(rank[moment] for rank in ranks) - kill
        for moment in MOMENTS
        if moment in ranks[0]
    }
    row["own"] = max(rank["stepped"] - (rank["loaded"] - rank["loading"]) for rank in ranks) - kill
    return row


def shown(seconds: float | None) -> str:
    """Seconds for people."""
    return "–" if seconds is None else f"{seconds:.3f}"


if __name__ == "__main__":
    publish(main)
