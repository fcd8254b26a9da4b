"""How long the planner takes for deep models on large clusters, with memory that binds and without.

    python -m benchmarks.planning.large_plans [CASE …]

``search_and_scale`` prints the same table. Each plan has a process of its own, so that its peak
memory is its own, and none of what it took to estimate the model; libraries are loaded before the
clock starts.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.common.alone import publish
from penstock import Cluster, Device, Layer, LayerGraph, Link

_MIB = 2**20


class LargePlan(NamedTuple):
    """A plan to ask for.

    Attributes:
        num_layers: of a chain of random layers; 0 for Llama-3 405B, estimated on H100.
        num_devices: of one flat cluster; of hosts of eight H100 for Llama.
        num_microbatches: of a minibatch.
        memory_mib: of each device; 0 for no limit, or what an H100 has.
        most_seconds: how long it should take.
    """

    num_layers: int
    num_devices: int
    num_microbatches: int
    memory_mib: int
    most_seconds: float


CASES = {
    "100-16": LargePlan(100, 16, 64, 0, 1),
    "100-16-tight": LargePlan(100, 16, 64, 700, 1),
    "200-64": LargePlan(200, 64, 256, 0, 3),
    "200-64-tight": LargePlan(200, 64, 256, 700, 3),
    "1000-1024": LargePlan(1000, 1024, 1024, 0, 20),
    "1000-1024-tight": LargePlan(1000, 1024, 1024, 700, 20),
    "405b-16384": LargePlan(0, 16384, 2048, 0, 30),
}


def deep_chain(num_layers: int, seed: int = 1) -> LayerGraph:
    """Random layers, each with 60 MB of weights, gradients and Adam's state in the mean, and 10 MB
    that a microbatch keeps, so that 700 MiB hold few layers with what is in flight."""
    chance = random.Random(seed)
    layers = tuple(
        Layer(
            name=f"layer{index}",
            forward_seconds=chance.uniform(0.5e-3, 2e-3),
            backward_input_seconds=chance.uniform(0.5e-3, 2e-3),
            backward_weight_seconds=chance.uniform(0.5e-3, 2e-3),
            update_seconds=1e-4,
            output_bytes=chance.randint(10**5, 10**6),
            parameter_bytes=(size := chance.randint(5, 25) * 10**6),
            optimizer_bytes=2 * size,
            activation_bytes=chance.randint(5, 15) * 10**6,
            held_input_bytes=10**6,
            weight_kept_bytes=5 * 10**6,
        )
        for index in range(num_layers)
    )
    return LayerGraph(layers=layers, input_bytes=10**6)


def flat_cluster(num_devices: int, memory_mib: int) -> Cluster:
    """Equal devices with equal links."""
    devices = tuple(
        Device(name=f"device{index}", memory_bytes=memory_mib * _MIB)
        for index in range(num_devices)
    )
    return Cluster(devices=devices, link=Link(latency_seconds=1e-5, bytes_per_second=5e9))


def llama_405b() -> LayerGraph:
    """Llama-3 405B with sequences of 8,192 tokens, a microbatch of one, estimated on H100."""
    import torch
    import torch.nn.functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    import penstock as pk

    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
        tokens = torch.empty(1, 8192, dtype=torch.long)

    def loss(output, tokens):
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return pk.estimate(
        model, tokens, device="h100-sxm", loss=loss, optimizer=torch.optim.AdamW, attention="causal"
    )


_ONE_PLAN = """
import json, resource, sys, time
import penstock as pk
from benchmarks.planning.large_plans import CASES, flat_cluster
from penstock.planning.planner.patience import PlanningPatience
from penstock.planning.planner.search import plan
case, graph = CASES[sys.argv[1]], pk.LayerGraph.load(sys.argv[2])
if case.num_layers:
    cluster, asked = flat_cluster(case.num_devices, case.memory_mib), {}
else:
    cluster = pk.Cluster.of("h100-sxm", hosts=case.num_devices // 8)
    asked = {"tensor_ranks": "any", "reducer": "sharded"}
started, used, first = time.perf_counter(), time.process_time(), []
note = PlanningPatience.note
def noted(*words):
    first.append(time.perf_counter() - started)
    note(*words)
PlanningPatience.note = noted
found = plan(graph, cluster, microbatches=case.num_microbatches, **asked)
seconds, busy = time.perf_counter() - started, time.process_time() - used
gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
replicas = sorted({*found.replicas})
print(json.dumps({
    "first": first[0], "seconds": seconds, "busy": busy, "gigabytes": gigabytes,
    "step": found.step_seconds, "stages": len(found.stages), "width": found.num_tensor_ranks,
    "replicas": f"{replicas[0]} to {replicas[-1]}" if len(replicas) > 1 else str(replicas[0]),
    "schedule": found.schedule,
    "again": sum(stage.recompute != "none" for stage in found.stages),
    "reason": found.reason,
}))
"""


_ONE_GRAPH = """
import sys
from benchmarks.planning.large_plans import CASES, deep_chain, llama_405b
num_layers = CASES[sys.argv[1]].num_layers
(deep_chain(num_layers) if num_layers else llama_405b()).save(sys.argv[2])
"""


def measure(name: str) -> dict:
    """The plan of a case, and the seconds and memory that it took."""
    with TemporaryDirectory() as folder:
        asked = [name, str(Path(folder) / "graph.json")]
        subprocess.run([sys.executable, "-c", _ONE_GRAPH, *asked], check=True)
        command = [sys.executable, "-c", _ONE_PLAN, *asked]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def print_plans(console: Console, names: tuple[str, ...] = tuple(CASES)) -> None:
    """A row per case."""
    table = Table(title="plans of deep models on many devices", box=None, pad_edge=False)
    columns = (
        "layers", "devices", "m", "MiB", "first s", "all s", "goal s", "CPU s", "peak GiB",
        "step s", "stages", "recompute", "copies", "tensor",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for name in names:
        case, row = CASES[name], measure(name)
        table.add_row(
            f"{case.num_layers:,}" if case.num_layers else "405B",
            f"{case.num_devices:,}",
            f"{case.num_microbatches:,}",
            str(case.memory_mib or ""),
            *(f"{row[key]:.2f}" for key in ("first", "seconds")),
            f"{case.most_seconds:g}",
            *(f"{row[key]:.2f}" for key in ("busy", "gigabytes")),
            f"{row['step']:.4g}",
            *(str(row[key]) for key in ("stages", "again", "replicas", "width")),
        )
    console.print(table)


def main() -> None:
    """The table of some cases, or of all."""
    names = tuple(sys.argv[1:]) or tuple(CASES)
    for name in names:
        if name not in CASES:
            sys.exit(f"there is no case {name}; there are {', '.join(CASES)}")
    print_plans(Console(width=140), names)


if __name__ == "__main__":
    publish(main)
