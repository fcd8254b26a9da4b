"""Plans with copies of stages, and summation servers in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

from msgspec.structs import replace

from penstock.planning.plans import Plan
from tests.kit.helpers import make_plan
from tests.kit.launch import ENVIRONMENT


def replicated(model, replicas, num_microbatches=6) -> Plan:
    """A plan in which stages have so many copies."""
    plan = make_plan(model, len(replicas), num_microbatches)
    stages = [replace(stage, rank=sum(replicas[:index])) for index, stage in enumerate(plan.stages)]
    return Plan(
        model=plan.model,
        schedule="1f1b",
        options={"replicas": list(replicas)},
        num_microbatches=num_microbatches,
        stages=tuple(stages),
    )


def side_by_side(model, schedule, num_ranks, copies, num_microbatches) -> Plan:
    """A plan of equal pipelines, each on so many ranks."""
    plan = make_plan(model, num_ranks, num_microbatches, schedule)
    stages = [replace(stage, rank=copies * stage.rank) for stage in plan.stages]
    return Plan(
        model=plan.model,
        schedule=schedule,
        options={"replicas": [copies] * len(stages)},
        num_microbatches=num_microbatches,
        stages=tuple(stages),
    )


@contextmanager
def served(count=1, *, job="job", environment=()):
    """(addresses, process numbers) of ``penstock serve``, so many times; ended afterwards."""
    command = [sys.executable, "-m", "penstock", "serve", "--job", job, "--listen", "127.0.0.1:0"]
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**ENVIRONMENT, **dict(environment)},
        )
        for _ in range(count)
    ]
    try:
        lines = [server.stdout.readline() for server in started]
        yield [line.split()[-1] for line in lines], [server.pid for server in started]
    finally:
        for server in started:
            server.terminate()
            server.wait(30)
            server.stdout.close()
