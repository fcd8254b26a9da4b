"""Three ranks train copies of a stage with every reducer; threads tell what must come out.

    torchrun ... reducers.py CASE ADDRESSES PIDS FOLDER

ADDRESSES and PIDS are those of servers, with commas between. Cases: ``same`` compares all ways with
threads, and kills the servers one after another; ``checkpoint`` goes on from shards in another
layout; ``parameter servers`` compares those with copies that update, on the way from one checkpoint
to the next; ``hosts`` sums on hosts first; ``stale`` lets updates be late, and does again what the
journal says; ``both ways`` has two ranks and no common order, ``devices`` two accelerators,
``served devices`` with a parameter server besides, and ``near devices`` sum by servers, inside
hosts first; ``stranger`` names another job than the servers;
``killed WAY VICTIM`` loses a rank, or ``killed WAY:HOSTS VICTIM`` on hosts with these digits.
Each rank reports in ``report-<rank>.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace

import penstock as pk
from penstock.base.errors import PenstockError
from penstock.core.cluster import SpareMachine
from penstock.core.schedule import Kind
from penstock.core.summation import split
from penstock.engine.transport import ProcessGroupTransport
from penstock.planning.plans import Plan
from penstock.trial.proof import copies_of
from penstock.trial.reference.stale_replay import StaleReplay
from tests.kit.accelerator import collectives
from tests.kit.accelerator.devices import register
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.reducing import replicated
from tests.kit.sharing import spread
from tests.kit.training import DEADLINE_SECONDS, adamw

STEPS = 4
LINKED = ("owners", "servers", "sharded")
WITH_SERVERS = ("servers", "parameter-server")
timelines = []


def spares(addresses):
    return [
        SpareMachine(name=f"spare{number}", bytes_per_second=1e9, address=address)
        for number, address in enumerate(addresses)
    ]


def plan_of(model, way, addresses, replicas=(3,), levels=()):
    plan = replicated(model, replicas)
    plan = replace(plan, summing=replace(plan.summing, levels=levels))
    return plan.with_reducer(way, spares(addresses) if way in WITH_SERVERS else ())


def on_devices(addresses, ways, transport="process-group", replicas=(2,), levels=()):
    """Copies on accelerators in software, which raise where a wait is missing; perhaps near each
    other."""
    found, model = [], make_mlp(dropout=0.1)
    devices = [f"emu:{rank}" for rank in range(sum(replicas))]
    expected = train(plan_of(model, "owners", (), replicas, levels), "threads", devices="cpu")
    for way, in_loop in product(ways, (False, True)):
        sent = collectives.DONE.num_bytes_sent
        plan = plan_of(model, way, addresses, replicas, levels)
        got = train(plan, transport, devices=devices, in_loop=in_loop)
        for key, value in got.items():
            if not torch.equal(value.cpu(), expected[key]):
                found.append(f"{way}: {key}")
        # A parameter server computes on the CPU.
        if got and (collectives.DONE.num_bytes_sent == sent) == (transport == "auto"):
            found.append(f"{way}: not by {transport}")
    torch.get_device_module().check()
    return found


def train(plan, transport, between=lambda step: None, *, in_loop=False, **options):
    """The weights after some steps; in a loop, ranks go on without waiting for each other's end."""
    torch.manual_seed(0)
    model = make_mlp(dropout=0.1)
    with pk.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=adamw, transport=transport, seed=1,
        deadline_seconds=DEADLINE_SECONDS, **options,
    ) as pipeline:  # fmt: skip
        if in_loop:
            for _ in pipeline.steps(make_batch(24, seed=step) for step in range(STEPS)):
                pass
        for step in range(0 if in_loop else STEPS):
            between(step)
            pipeline.step(*make_batch(24, seed=step))
        if options.get("record"):
            timelines.append(pipeline.timeline)
        return pipeline.state_dict()


def in_threads(trainings):
    """The weights after trainings with some (plan, options); each is made by one of the ranks."""
    return iter(spread([partial(train, plan, "threads", **own) for plan, own in trainings]))


@contextmanager
def apart(wanted, hosts=()):
    """Within, ranks believe to be on hosts of their own, if that is wanted, or on those with these
    numbers."""
    usual, own = ProcessGroupTransport.__init__, dist.get_rank()
    there = [rank for rank, host in enumerate(hosts) if host == hosts[own]] or [own]

    def begin(self, group, near, *rest, **options):
        usual(self, group, frozenset(there), *rest, **options)

    if wanted:
        ProcessGroupTransport.__init__ = begin
    try:
        yield
    finally:
        ProcessGroupTransport.__init__ = usual


def hosts():
    """Copies on hosts, some behind switches: processes, which exchange gradients while backwards
    run, add in the order in which threads do, and this is not the order of the ranks."""
    found, model = [], make_mlp(dropout=0.1)
    cases = [
        ("owners", (4,), ((0, 0, 1, 1),), {}),
        ("owners", (1, 3), ((0, 0, 1, 1),), {"clip_norm": 0.5}),
        ("owners", (4,), ((0, 1, 1, 2), (0, 0, 0, 1)), {}),
        ("sharded", (4,), ((0, 1, 0, 1),), {}),
        ("sharded", (4,), ((0, 0, 1, 1),), {"clip_norm": 0.5}),
        ("sharded", (4,), ((0, 0, 1, 1),), {"in_loop": True}),
        ("parameter-server", (3,), ((0, 0, 1),), {}),
    ]
    clips = [{key: own for key, own in case[-1].items() if key == "clip_norm"} for case in cases]
    of_threads = in_threads(
        (plan_of(model, "owners", (), replicas, own_levels), clip)
        for (_, replicas, levels, _), clip in zip(cases, clips, strict=True)
        for own_levels in (levels, ())
    )
    for way, replicas, levels, options in cases:
        expected, flat = next(of_threads), next(of_threads)
        if len(levels[0]) > 3 and all(torch.equal(flat[key], expected[key]) for key in flat):
            found.append(f"{levels} add as no levels do")
        plan = plan_of(model, way, (), replicas, levels)
        on_hosts = (*levels[-1], 9)[: dist.get_world_size()]
        for transport, across in (("auto", False), ("process-group", True)):
            with apart(across, on_hosts):
                got = train(plan, transport, **options)
            for key, value in got.items():
                if not torch.equal(value, expected[key]):
                    found.append(f"{way} {replicas} {levels} {options} {transport}: {key}")
    return found


def exchanged(timeline):
    """What is wrong with what a timeline says of sums: parts leave while the last backward runs."""
    sums = [one for one in timeline.transfers if one.stage == 0]
    ends = [s.end for s in timeline.spans if s.op.stage == 0 and s.op.kind is Kind.BACKWARD]
    updates = [s.end for s in timeline.spans if s.op.stage == 0 and s.op.kind is Kind.UPDATE]
    if len(sums) < 2 or not min(one.start for one in sums) < max(ends):
        return [f"no part left early: {sums}"]
    return [f"{one} ends late" for one in sums if one.end > max(updates)]


def same(addresses, pids):
    found = []
    model = make_mlp(dropout=0.1)
    timelines.clear()

    def kills(step):
        if step and dist.get_rank() == 0 and pids:
            os.kill(int(pids.pop()), signal.SIGKILL)

    settings = [*product(((3,), (1, 2)), ({}, {"clip_norm": 0.5}))]
    of_threads = in_threads((plan_of(model, "owners", (), own), clip) for own, clip in settings)
    for (replicas, clip), expected in zip(settings, of_threads, strict=True):
        for way in ("owners", "servers", "all-reduce", "sharded"):
            last = way == "servers" and replicas == (1, 2) and clip
            plan = plan_of(model, way, addresses, replicas)
            between = kills if last else lambda step: None
            more = {"in_loop": way == "sharded", "record": way == "owners", **clip}
            with apart(replicas == (3,)):
                got = train(plan, "process-group", between, **more)
            found += exchanged(timelines.pop()) if (way, replicas) == ("owners", (3,)) else []
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
            got = train(plan.with_reducer(way, servers), "process-group")
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
    near = ((0, 0, 1),)  # one host has half of the rows
    for replicas, first, levels in (((1, 2), 0, ()), ((3,), 2, near), ((2, 1), 4, ())):
        expected = going_on(
            plan_of(model, "owners", (), replicas, levels), "threads", own, first, first + 2
        )
        for way in ("sharded", "owners") if first == 2 else ("sharded",):
            plan = plan_of(model, way, (), replicas, levels)
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


def parameter_servers(folder):
    """Four ranks: two or three have copies of stages, and the others update; then all have copies,
    and then the same again. Names of weights that are not those of copies alone."""
    model, own, found = make_mlp(), folder / f"own-{dist.get_rank()}", []
    layouts = [((1, 2), ["a"]), ((1, 3), []), ((2,), ["a", "b"]), ((2,), ["a", "b"])]
    for number, (replicas, servers) in enumerate(layouts):
        first, transport = 2 * number, ("auto", "process-group")[number % 2]
        plan = plan_of(model, "owners", (), replicas)
        expected = going_on(plan, "threads", own, first, first + 2)
        served = plan.with_reducer("parameter-server", spares(servers)) if servers else plan
        clip = {"clip_norm": 0.5} if number == 3 else {}
        if clip:
            expected = train(plan, "threads", **clip)
            got = train(served, transport, **clip)
        else:
            got = going_on(served, transport, folder / "run", first, first + 2)
        dist.barrier()
        assert bool(got) == (dist.get_rank() < plan.num_ranks)
        found += [key for key, value in got.items() if not torch.equal(value, expected[key])]
    return found


def stale():
    """Two ranks have copies, one pauses, and the third updates without waiting for it; names of
    weights that are not what the journal says, and how late gradients were."""
    found, last = [], dist.get_rank() == 1
    model = make_mlp(dropout=0.1)
    plans = [replicated(model, (2,)), make_plan(model, 2, 4, "chimera")]
    for plan, transport in zip(plans, ("process-group", "auto"), strict=True):
        model, twin = make_mlp(dropout=0.1), make_mlp(dropout=0.1)
        late = plan.with_reducer("parameter-server", stale=2)
        model[0].register_forward_hook(lambda *_: time.sleep(0.03 * last))
        batches = [make_batch(12, seed=k) for k in range(8)]
        with pk.Pipeline(
            model, late, loss=F.cross_entropy, optimizer=adamw, transport=transport, seed=1,
            deadline_seconds=DEADLINE_SECONDS,
        ) as pipeline:  # fmt: skip
            losses = list(pipeline.steps(batches[:5]))
            journals = [pipeline.stale_streams]
            for loss in pipeline.steps(batches[5:]):
                losses.append(loss)
                break
            journals.append(pipeline.stale_streams)
            weights = pipeline.gather_state_dict(rank=0)
        if not weights:
            continue
        replay = StaleReplay(
            twin, [len(one.layers) for one in late.stages], late.num_microbatches,
            F.cross_entropy, adamw, seed=1, copy_of=copies_of(late),
        )  # fmt: skip
        done = 1 + max(one.minibatch for own in journals[1][0].updates for one in own)
        wanted = replay.train(batches[:5], journals[0])
        wanted += replay.train(batches[5 : 5 + done], journals[1])
        if losses != wanted[: len(losses)]:
            found.append(f"losses of {late.schedule}")
        theirs = twin.state_dict()
        found += [key for key, value in weights.items() if not torch.equal(value, theirs[key])]
        delays = [delay for one in journals[0].values() for delay in one.delays.values()]
        if max(delays) > 2 or (late.schedule == "1f1b" and not max(delays)):
            found.append(f"delays {delays}")
    return found


def refused(way, addresses, between=lambda step: None):
    """What a training ends with."""
    replicas = (2,) if way in {"parameter-server", "stale"} else (3,)
    way, _, levels = way.partition(":")
    near = tuple(map(int, levels))
    try:
        if near:
            plan = plan_of(make_mlp(), way, (), (len(near),), (near,))
        else:
            known = way if way != "stale" else "owners"
            plan = plan_of(make_mlp(), known, addresses[:1], replicas)
        if way == "stale":
            plan = plan.with_reducer("parameter-server", stale=2)
        train(plan, "process-group", between)
    except PenstockError as error:
        return [type(error).__name__, str(error)]
    return []


def dies(victim, step):
    if step == 2 and dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    case, addresses, pids = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
    folder = Path(sys.argv[-1])
    torch.set_num_threads(1)
    split.LEAST_PORTION_BYTES = 1000  # or these small models would leave in one
    if case.endswith("devices"):
        register()
        collectives.register()
    dist.init_process_group("gloo")
    compares = {
        "same": partial(same, addresses, pids),
        "both ways": partial(both_ways, addresses),
        "devices": partial(on_devices, addresses, ("servers", "sharded", "all-reduce")),
        "linked devices": partial(on_devices, addresses, LINKED, "auto", (1, 2)),
        "near devices": partial(on_devices, addresses, ("servers",), "auto", (3,), ((0, 0, 1),)),
        "served linked devices": partial(
            on_devices, ["spare:1"], ("parameter-server",), "auto", (1, 2)
        ),
        "served devices": partial(on_devices, ["spare:1"], ("parameter-server",)),
        "checkpoint": partial(checkpoint, folder),
        "parameter servers": partial(parameter_servers, folder),
        "stale": stale,
        "hosts": hosts,
        "hosts of linked devices": partial(
            on_devices, (), ("owners", "sharded"), "auto", (1, 3), ((0, 1, 1, 2),)
        ),
    }
    if case in compares:
        found = compares[case]()
    elif case == "stranger":
        os.environ["PENSTOCK_JOB"] = "another job"
        found = refused("servers", addresses)
    else:
        _, way, victim = case.split()
        found = refused(way, addresses, partial(dies, int(victim)))
    report = folder / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps(found))
    if case in compares:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
