"""Holds a rebuilt house to an earlier one: the same random cases, bit for bit.

    python -m tests.soak.frozen                      # beside the commit that FROZEN names
    python -m tests.soak.frozen --against HEAD~1 --seed 7 --count 300

Schedules are built, lowered by random passes, checked and simulated; plans are searched, written,
read and explained; models are trained in threads. Of each case a hash says all that came out. Both
versions run in processes of their own on the same machine, so that also losses and weights are
compared to the bit. Rooms may have moved between the versions: ``Rooms`` finds them by their last
names.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import os
import pkgutil
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

FROZEN = "8485347cad51006800d37f5f00e6b8de2816f4e0"
"""What all steps of a rebuilding are compared with. It moves on when results change on purpose."""

ROOT = Path(__file__).parents[2]
REFUSED = ", refused"
SHARES = {"schedules": 0.5, "plans": 0.3, "trainings": 0.2}


@cache
def _modules() -> tuple[str, ...]:
    import penstock

    walked = pkgutil.walk_packages(penstock.__path__, "penstock.", onerror=lambda _: None)
    return tuple(module.name for module in walked if "interop" not in module.name)


def room(name: str) -> Any:
    """A module by the end of its name, wherever the wings put it."""
    [module] = [known for known in _modules() if known.endswith(f".{name}")]
    return importlib.import_module(module)


def _schedule(dice: random.Random) -> Iterator[object]:
    import penstock as pk

    names = [name for name in pk.schedules.names() if name not in {"zb-auto", "optimal", "spilled"}]
    name, ranks = dice.choice(names), dice.randint(1, 6)
    schedule = pk.schedules.build(name, num_ranks=ranks, num_microbatches=dice.randint(1, 14))
    yield name, schedule.ranks, schedule.stages_of
    lower = room("schedule.lower")
    passes: list[Callable[[Any], Any]] = []
    if dice.random() < 0.3:
        passes.append(lower.split_backward)
    if dice.random() < 0.3:
        passes.append(lower.add_recompute)
    if dice.random() < 0.5:
        passes.append(lower.add_free)
    if name not in {"pipedream", "pipedream-2bw", "partime"}:
        together = dice.random() < 0.5
        passes.append(lambda value: lower.add_update(value, together=together))
        if together:
            late = dice.random() < 0.5
            passes.append(lambda value: lower.add_agreement(value, late=late))
    passes.append(lower.add_communication)
    for add in passes:
        schedule = add(schedule)
        yield schedule.ranks
    pk.check(schedule)
    stages = schedule.num_stages
    costs = pk.Costs(
        forward=[dice.uniform(0.5, 2) for _ in range(stages)],
        backward_input=[dice.uniform(0.5, 2) for _ in range(stages)],
        backward_weight=dice.uniform(0, 2),
        hop=dice.choice([0.0, 0.1, 0.7]),
        link=dice.choice([0.0, 0.3]),
        update=dice.choice([0.0, 0.5]),
    )
    yield _drawn(pk.simulate(schedule, costs))
    yield pk.draw(pk.simulate(schedule, costs))


def _drawn(timeline: Any) -> object:
    spans = [(span.rank, str(span.op), span.start.hex(), span.end.hex()) for span in timeline.spans]
    return spans, timeline.makespan.hex(), timeline.bubble.hex(), timeline.peak_activations


@cache
def _count_keyword() -> str:
    """The keyword of ``plan``, which had another name once."""
    import penstock as pk

    names = inspect.signature(pk.plan).parameters
    return "num_microbatches" if "num_microbatches" in names else "microbatches"


def _plan(dice: random.Random) -> Iterator[object]:
    import penstock as pk

    def layer(number: int) -> Any:
        forward = dice.uniform(0.001, 0.02)
        return pk.Layer(
            name=f"layer{number}",
            forward_seconds=forward,
            backward_input_seconds=forward * dice.uniform(0.8, 1.2),
            backward_weight_seconds=forward * dice.uniform(0.3, 1.2),
            activation_bytes=dice.randint(1 << 10, 1 << 24),
            output_bytes=dice.randint(1 << 10, 1 << 20),
            parameter_bytes=dice.randint(0, 1 << 24),
            optimizer_bytes=dice.randint(0, 1 << 24),
        )

    graph = pk.LayerGraph(layers=tuple(map(layer, range(dice.randint(3, 14)))), input_bytes=4096)
    devices = tuple(
        pk.Device(name=f"d{number}", speed=dice.choice([1.0, 1.0, 0.5, 2.0]))
        for number in range(dice.randint(2, 6))
    )
    link = pk.Link(latency_seconds=1e-5, bytes_per_second=dice.choice([1e8, 1e9, 1e10]))
    cluster = pk.Cluster(devices=devices, link=link)
    request: dict[str, Any] = {_count_keyword(): dice.choice([1, 4, 8, 13])}
    request["schedule"] = dice.choice([None, "1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])
    if dice.random() < 0.3:
        request |= {"schedule": None, "asynchronous": True}
    if dice.random() < 0.3:
        request["memory_bytes"] = dice.randint(1 << 25, 1 << 28)
    if dice.random() < 0.2:
        request |= {"schedule": None, "replicas": "any"}
    yield sorted(request.values(), key=str)
    plan = pk.plan(graph, cluster, **request)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        plan.save(path)
        # A key that is new since, and says nothing here, changes no plan.
        written = json.loads(path.read_text())
        yield {key: value for key, value in written.items() if value is not None}
        yield str(pk.Plan.load(path))
    yield _drawn(plan.simulate()), room("plans.explanation").explain(plan), pk.draw(plan)


def _training(dice: random.Random) -> Iterator[object]:
    import torch
    from torch import nn

    import penstock as pk

    torch.manual_seed(dice.randint(0, 1 << 30))
    width, blocks = dice.choice([4, 6]), dice.randint(2, 7)
    pool: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(width, width),
        lambda: nn.Sequential(nn.Linear(width, 9), nn.GELU(), nn.Linear(9, width)),
        lambda: nn.LayerNorm(width),
        lambda: nn.Dropout(0.2),
    ]
    model = nn.Sequential(*(dice.choice(pool)() for _ in range(blocks)), nn.Linear(width, 3))
    names = [None, "1f1b", "gpipe", "zb-h1", "zb-v", "interleaved-1f1b", "chimera"]
    name = dice.choice([*names, "pipedream", "pipedream-2bw"])
    microbatches, rows = dice.choice([4, 8]), dice.randint(1, 3)
    graph = pk.LayerGraph(
        layers=tuple(
            pk.Layer(
                name=str(number),
                forward_seconds=0.01,
                backward_input_seconds=0.01,
                backward_weight_seconds=0.01,
                activation_bytes=1024,
                output_bytes=1024,
                parameter_bytes=1024,
                optimizer_bytes=2048,
                signature=layer.signature,  # a pipeline refuses the plan of another model
            )
            for number, layer in enumerate(room("model.spine").spine_of(model))
        ),
        microbatch_size=rows,
        input_bytes=1024,
    )
    plan = pk.plan(
        graph,
        pk.Cluster(devices=tuple(pk.Device(name=f"c{number}") for number in range(2))),
        **{_count_keyword(): microbatches},
        schedule=name,
        recompute=dice.choice(["never", "stage"]) if name else "where-needed",
    )
    optimizer = dice.choice([torch.optim.SGD, torch.optim.AdamW])
    clip_norm = dice.choice([None, 0.5]) if name not in {"pipedream", "pipedream-2bw"} else None
    yield name, microbatches, rows, width, optimizer.__name__, clip_norm, str(model)
    loss = nn.CrossEntropyLoss()
    with pk.Pipeline(
        model,
        plan,
        loss=loss,
        optimizer=lambda parameters: optimizer(parameters, lr=0.05),
        clip_norm=clip_norm,
    ) as pipeline:
        for _ in range(3):
            inputs = torch.randn(rows * microbatches, width)
            yield float(pipeline.step(inputs, torch.randint(0, 3, (len(inputs),)))).hex()
        for rank in range(pipeline.timeline.num_ranks):
            spans = [span for span in pipeline.timeline.spans if span.rank == rank]
            yield [str(span.op) for span in sorted(spans, key=lambda span: span.start)]
        yield {key: value.tolist() for key, value in pipeline.state_dict().items()}


CASES = {"schedules": _schedule, "plans": _plan, "trainings": _training}


def hashes(kind: str, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Of each case its name, and a hash of all that came out; a refusal is a result, too, and its
    name says so."""
    import penstock as pk

    for number in range(count):
        digest, name = hashlib.sha256(), f"{kind} {number}"
        try:
            for result in CASES[kind](random.Random(f"{kind} {seed} {number}")):
                digest.update(repr(result).encode())
        except pk.errors.PenstockError as error:
            digest.update(f"{type(error).__name__}: {error}".encode())
            name += REFUSED
        yield name, digest.hexdigest()[:16]


def _hashed(source: Path, seed: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--hashes", "--seed", str(seed), "--count", str(count)]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONHASHSEED": "0"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _unpacked(revision: str, folder: str) -> Path:
    command = ["git", "archive", "--format=tar", revision, "src"]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        sys.exit(
            f"no {revision} here: {packed.stderr.decode().strip()}; a shallow clone has no "
            "history (git fetch --unshallow), and --against names another commit"
        )
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return Path(folder, "src")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", default=FROZEN, metavar="COMMIT")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--hashes", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hashes:
        for kind, share in SHARES.items():
            for name, digest in hashes(kind, options.seed, round(options.count * share)):
                print(name, digest, flush=True)
        return 0
    print(f"seed {options.seed}, {options.count} cases, against {options.against}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        sources = [_unpacked(options.against, folder), ROOT / "src"]
        running = [_hashed(source, options.seed, options.count) for source in sources]
        before, now = (process.communicate()[0].splitlines() for process in running)
    if any(process.returncode for process in running) or len(before) != len(now):
        print("a version failed: see above")
        return 1
    parted = [line.rpartition(" ")[0] for line, old in zip(now, before, strict=True) if line != old]
    print(f"{len(now) - len(parted)} of {len(now)} cases are the same" + ":" * bool(parted))
    for name in parted:
        print(f"  {name} differs")
    return bool(parted) or _says_little(now)


def _says_little(now: Sequence[str]) -> bool:
    """Whether most cases of a kind are refusals, which are alike whatever was rebuilt."""
    little = False
    for kind in CASES:
        cases = [line for line in now if line.startswith(kind)]
        refused = sum(REFUSED in line for line in cases)
        if refused:
            print(f"  {refused} of {len(cases)} {kind} were refused")
        if 2 * refused > len(cases):
            print(f"  that says little of {kind}: mend how their cases are made")
            little = True
    return little


if __name__ == "__main__":
    sys.exit(main())
