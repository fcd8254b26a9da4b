"""Many jobs at once, each with a rank that is in trouble while its Pipeline starts.

    python start_up.py FOLDER

All are forked from one process that has imported everything, and mostly wait. Each rank that can
writes ``<case>-<rank>.json``; the parent ends those that are stopped.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import penstock as pk
from tests.kit.helpers import make_batch, make_mlp, make_plan

SOON_SECONDS = 6.0
"""A deadline that has to pass."""

LONG_SECONDS = 350.0
"""A deadline that must not pass."""

STEP_SECONDS = 1.0
NUM_PIPELINES = 24

_HOLDERS: list[socket.socket] = []
"""They stay open until the job ends."""


class Case(NamedTuple):
    """A job, and what happens to one of its ranks.

    Attributes:
        how: what happens to the victim.
        when: ``"before"`` its Pipeline, ``"during"``, while its optimizer is made, or in its first
            and second ``"steps"``.
        victim: the rank.
        startup_seconds: the deadline of all ranks.
        transport: of the pipeline.
        rank_0_keeps: the store; otherwise another process does, as under torchrun.
        group_first: the script makes torch's process group itself.
    """

    how: str
    when: str
    victim: int = 1
    startup_seconds: float = SOON_SECONDS
    transport: str = "auto"
    rank_0_keeps: bool = False
    group_first: bool = False
    num_ranks: int = 3


CASES = {
    "killed before": Case("kill", "before", group_first=True),
    "stopped before": Case("stop", "before", victim=2, transport="process-group"),
    "raises during": Case("fail", "during", startup_seconds=LONG_SECONDS),
    "killed during": Case("kill", "during", victim=0, startup_seconds=LONG_SECONDS),
    "stopped during": Case("stop", "during", transport="process-group"),
    "keeper stopped before": Case("stop", "before", 0, rank_0_keeps=True, group_first=True),
    "keeper stopped during": Case("stop", "during", 0, rank_0_keeps=True),
    "keeper killed during": Case("kill", "during", 0, LONG_SECONDS, rank_0_keeps=True),
    "never comes": Case("leave", "at once", rank_0_keeps=True),
    "slow": Case("sleep", "steps", startup_seconds=LONG_SECONDS),
    "many": Case("count", "many", startup_seconds=LONG_SECONDS, num_ranks=2),
}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    os._exit(0)


def fail() -> None:
    raise ValueError("no such optimizer")


TROUBLES = {trouble.__name__: trouble for trouble in (kill, stop, leave, fail)}


def pipeline_of(case: Case, **options) -> pk.Pipeline:
    model = make_mlp()
    return pk.Pipeline(
        model,
        make_plan(model, case.num_ranks, 4),
        loss=F.cross_entropy,
        transport=case.transport,
        deadline_seconds=STEP_SECONDS,
        startup_seconds=case.startup_seconds,
        **options,
    )


def train(case: Case, rank: int) -> None:
    """What the script of a rank does; its trouble happens where the case says."""
    strikes = TROUBLES[case.how] if rank == case.victim else lambda: None
    if case.when == "at once":
        strikes()
    if case.group_first:
        dist.init_process_group("gloo")
        dist.barrier()
    if case.when == "before":
        strikes()

    def optimizer(parameters):
        if case.when == "during":
            strikes()
        return torch.optim.SGD(parameters, lr=0.1)

    pipeline_of(case, optimizer=optimizer).step(*make_batch(8))


def steps(case: Case, rank: int) -> dict:
    """A first step that takes longer than later ones may; then one that hangs."""
    pipeline = pipeline_of(case)
    seconds = iter((3 * STEP_SECONDS, LONG_SECONDS))

    def loiter(module, inputs):
        if rank == case.victim and module.training:
            module.training = False  # once in each step
            time.sleep(next(seconds))

    layer = next(iter(pipeline.stages.values())).layers[0].module
    layer.register_forward_pre_hook(loiter)
    losses = [float(pipeline.step(*make_batch(8)))]
    layer.training = True
    if rank == case.victim:
        write(case, rank, {"losses": losses})
    try:
        pipeline.step(*make_batch(8))
    except pk.errors.RunError as error:
        return {"losses": losses, **told(error)}
    return {"losses": losses}


def opened() -> tuple[int, int]:
    """Descriptors and threads that stay with this process."""
    gc.collect()
    looks = []
    for _ in range(10):  # threads come to their end by themselves
        time.sleep(0.02)
        looks.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")])
    return tuple(map(min, *looks))


def many(case: Case, rank: int) -> dict:
    """Pipelines one after the other, closed and forgotten, over both ways."""
    counts = []
    for number in range(NUM_PIPELINES):
        way = ("shared-memory", "process-group")[number // 2 % 2]
        pipeline = pipeline_of(case._replace(transport=way))
        pipeline.step(*make_batch(8))
        if number % 2:
            pipeline.close()
        del pipeline
        counts.append(opened())
    return {"counts": counts}


def told(error: Exception) -> dict:
    return {"kind": type(error).__name__, "message": str(error)}


def write(case: Case, rank: int, report: dict) -> None:
    (name,) = [name for name, other in CASES.items() if other is case]
    path = Path(sys.argv[1]) / f"{name}-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(report))
    path.with_suffix(".part").rename(path)


def be_rank(case: Case, rank: int, port: int) -> None:
    place = {"RANK": rank, "WORLD_SIZE": case.num_ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(not case.rank_0_keeps)
    act = {"steps": steps, "many": many}.get(case.when, train)
    start = time.monotonic()
    try:
        report = act(case, rank) or {"kind": ""}
    except Exception as error:
        report = told(error)
    write(case, rank, {**report, "seconds": time.monotonic() - start})


def forked(work, *arguments) -> int:
    child = os.fork()
    if child == 0:
        try:
            work(*arguments)
        except BaseException:
            traceback.print_exc()
        # As at the end of a script, but without what the parent would do there.
        if dist.is_initialized():
            dist.destroy_process_group()
        os._exit(0)
    return child


def keep_store(channel) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel.send(store.port.to_bytes(4, "big"))
    time.sleep(1000)


def reserved_port() -> int:
    """A port for a store that is made later; until then no connection of another job takes it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as stores do, so both may
    holder.bind(("127.0.0.1", 0))
    _HOLDERS.append(holder)
    return holder.getsockname()[1]


def started(case: Case) -> tuple[list[int], list[int]]:
    """(ranks that will end, processes that have to be ended)."""
    here, there = socket.socketpair()
    keepers = []
    if case.rank_0_keeps:
        port = reserved_port()
    else:
        keepers.append(forked(keep_store, there))
        port = int.from_bytes(here.recv(4), "big")
    here.close()
    there.close()
    ranks = [forked(be_rank, case, rank, port) for rank in range(case.num_ranks)]
    victim = [] if case.when == "many" else [ranks.pop(case.victim)]
    if case.how == "fail":
        ranks += victim
        victim = []
    return ranks, [*keepers, *victim]


def main() -> None:
    torch.set_num_threads(1)
    assert pk.Pipeline  # loaded here once, and so is what the first optimizer loads
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    gc.freeze()  # ranks count what they leave again and again, and need not copy what is there
    jobs = [started(case) for case in CASES.values()]
    for ranks, _ in jobs:
        for child in ranks:
            os.waitpid(child, 0)
    for _, rest in jobs:
        for child in rest:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
