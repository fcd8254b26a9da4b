"""Three ranks train copies of a stage with every reducer; threads tell what must come out.

    torchrun ... reducers.py CASE ADDRESSES PIDS FOLDER

ADDRESSES and PIDS are those of servers, with commas between. Cases: ``same`` compares all ways with
threads, and kills the servers one after another; ``checkpoint`` goes on from shards in another
layout; ``both ways`` has two ranks and no common order, ``devices`` two accelerators; ``stranger``
names another job than the servers; ``killed WAY`` loses a rank. Each rank reports in
``report-<rank>.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace

import penstock as pk
from penstock.cluster import SpareMachine
from penstock.errors import PenstockError
from penstock.plans import Plan
from tests.kit.accelerator.devices import register
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.reducing import replicated
from tests.kit.training import DEADLINE_SECONDS, adamw

STEPS = 4


def spares(addresses):
    return [
        SpareMachine(name=f"spare{number}", bytes_per_second=1e9, address=address)
        for number, address in enumerate(addresses)
    ]


def plan_of(model, way, addresses, replicas=(3,)):
    plan = replicated(model, replicas)
    return plan.summed_by(way, spares(addresses) if way == "servers" else ())


def on_devices(addresses):
    """Copies on accelerators in software, which raise where a wait is missing."""
    found, model = [], make_mlp(dropout=0.1)
    expected = train(plan_of(model, "owners", (), (2,)), "threads", devices="cpu")
    for way in ("servers", "sharded", "all-reduce"):
        plan = plan_of(model, way, addresses, (2,))
        got = train(plan, "process-group", devices=["emu:0", "emu:1"])
        found += [key for key, value in got.items() if not torch.equal(value.cpu(), expected[key])]
    torch.get_device_module().check()
    return found


def train(plan, transport, between=lambda step: None, **options):
    """The weights after some steps."""
    torch.manual_seed(0)
    model = make_mlp(dropout=0.1)
    with pk.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=adamw, transport=transport, seed=1,
        deadline_seconds=DEADLINE_SECONDS, **options,
    ) as pipeline:  # fmt: skip
        for step in range(STEPS):
            between(step)
            pipeline.step(*make_batch(24, seed=step))
        return pipeline.state_dict()


def same(addresses, pids):
    found = []
    model = make_mlp(dropout=0.1)

    def kills(step):
        if step and dist.get_rank() == 0 and pids:
            os.kill(int(pids.pop()), signal.SIGKILL)

    for replicas in ((3,), (1, 2)):
        for clip in ({}, {"clip_norm": 0.5}):
            expected = train(plan_of(model, "owners", (), replicas), "threads", **clip)
            for way in ("owners", "servers", "all-reduce", "sharded"):
                last = way == "servers" and replicas == (1, 2) and clip
                plan = plan_of(model, way, addresses, replicas)
                between = kills if last else lambda step: None
                got = train(plan, "process-group", between, **clip)
                for key, value in got.items():
                    if way == "all-reduce":
                        torch.testing.assert_close(value, expected[key])
                    elif not torch.equal(value, expected[key]):
                        found.append(f"{way} {replicas} {clip}: {key}")
    return found


def both_ways(addresses):
    """Two pipelines in opposite directions, and copies that update without a flush: ranks come to
    their stages in different orders."""
    found = []
    model = make_mlp(dropout=0.1)
    chimera = make_plan(model, 2, 4, "chimera")
    stream = Plan(
        model=chimera.model, schedule="pipedream", num_microbatches=4,
        options={"replicas": [2]}, stages=(replace(replicated(model, (2,)).stages[0], rank=0),),
    )  # fmt: skip
    for plan, ways in ((chimera, ("servers", "sharded", "all-reduce")), (stream, ("servers",))):
        expected = train(plan, "threads")
        for way in ways:
            servers = spares(addresses) if way == "servers" else ()
            got = train(plan.summed_by(way, servers), "process-group")
            for key, value in got.items():
                if way == "all-reduce" or not torch.equal(value, expected[key]):
                    torch.testing.assert_close(value, expected[key])
                    found += [] if way == "all-reduce" else [f"{plan.schedule} {way}: {key}"]
    return found


def going_on(plan, transport, folder, first, last):
    """The weights after some steps of a run that goes on from a folder and saves there."""
    with pk.Pipeline(
        make_mlp(dropout=0.1), plan, loss=F.cross_entropy, optimizer=adamw, transport=transport,
        seed=1, deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        assert first == (pipeline.load(folder) or 0)
        for step in range(first, last):
            pipeline.step(*make_batch(24, seed=step))
        pipeline.save(folder)
        return pipeline.state_dict()


def checkpoint(folder):
    """Trainings with shards that go on in another layout, beside one in threads that does likewise;
    names of parts, and of weights that are not the same."""
    model, own = make_mlp(), folder / f"own-{dist.get_rank()}"
    found = []
    for replicas, first in (((1, 2), 0), ((3,), 2), ((2, 1), 4)):
        expected = going_on(
            plan_of(model, "owners", (), replicas), "threads", own, first, first + 2
        )
        for way in ("sharded", "owners") if first == 2 else ("sharded",):
            plan = plan_of(model, way, (), replicas)
            got = going_on(plan, "process-group", folder / "run", first, first + 2)
            dist.barrier()
            found += [key for key, value in got.items() if not torch.equal(value, expected[key])]
            saved = folder / "run" / f"step-{first + 2:08d}"
            found += sorted(path.name for path in saved.glob("*part*"))
            dist.barrier()
            if (way, first) == ("sharded", 2):
                aside = folder / "run" / "aside"
                if dist.get_rank() == 0:
                    saved.rename(aside)  # the other way goes on from the same step
                dist.barrier()
        dist.barrier()
    return found


def refused(way, addresses, between=lambda step: None):
    """What a training ends with."""
    try:
        train(plan_of(make_mlp(), way, addresses), "process-group", between)
    except PenstockError as error:
        return [type(error).__name__, str(error)]
    return []


def dies(step):
    if step == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    case, addresses, pids = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
    torch.set_num_threads(1)
    if case == "devices":
        register()
    dist.init_process_group("gloo")
    if case == "same":
        found = same(addresses, pids)
    elif case == "devices":
        found = on_devices(addresses)
    elif case == "both ways":
        found = both_ways(addresses)
    elif case == "checkpoint":
        found = checkpoint(Path(sys.argv[-1]))
    elif case == "stranger":
        os.environ["PENSTOCK_JOB"] = "another job"
        found = refused("servers", addresses)
    else:
        found = refused(case.split()[1], addresses, dies)
    report = Path(sys.argv[-1]) / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps(found))
    if case in {"same", "checkpoint", "both ways", "devices"}:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
