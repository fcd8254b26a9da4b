"""The step time and memory of a published run, from its model, layout and device alone.

Settings that a row does not say follow rules, and such rows are reported apart:
  recomputation unknown → none; precision not stated → 16 bit;
  attention unknown → fused since July 2023, products and softmax before;
  ZeRO unknown → the optimizer shared (stage 1) with Megatron-Core and later, else none;
  sequence parallelism unknown → on where there are tensor ranks, since 2022-06;
  network unknown → the card of the device's usual host.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple

from msgspec.structs import replace

import penstock as pk
from benchmarks.predicting.published_models import Costs, Shape, costs_of
from penstock.core import catalogue
from penstock.core.catalogue import Figure, Hardware, HostSpec
from penstock.core.cluster.from_catalogue import host_of
from penstock.core.pricing import CollectiveRing, all_reduce_seconds, gather_seconds, hop_seconds

MEGATRON_2023, MEGATRON_CORE = "megatron-2023", "megatron-core"
_STACKS = {
    "vtrain": MEGATRON_2023, "bloom": "megatron-deepspeed-2022", "megatron2021": MEGATRON_2023,
    "korthikanti2022": MEGATRON_2023, "zerobubble": MEGATRON_2023, "sailor": MEGATRON_2023,
    "simumax": MEGATRON_CORE, "mbridge": "megatron-bridge", "nemo": "megatron-bridge",
    "megascale": MEGATRON_CORE, "jeanzay": MEGATRON_2023, "llama3": MEGATRON_CORE,
    "llm-foundry": "llm-foundry", "torchtitan": "eager",
}  # fmt: skip
_OLD = (MEGATRON_2023, "megatron-deepspeed-2022")
_MODERN = (MEGATRON_CORE, "megatron-bridge")
_SCHEDULES = {
    "none": "1f1b", "1F1B": "1f1b", "interleaved 1F1B": "interleaved-1f1b", "ZB-1p": "zb-h1",
    "ZB-2p": "zb-h2", "ZB-V": "zb-v", "ZB-2p with a synchronised optimizer step": "zb-h2",
}  # fmt: skip


class NotPredictedError(Exception):
    """Why a row is not predicted."""


class Setting(NamedTuple):
    """A row with all that it says, and what the rules say for the rest.

    Attributes:
        assumed: which settings the rules decided.
    """

    row: dict[str, Any]
    device: Hardware
    host: HostSpec
    stack: str
    arithmetic: str | None
    recompute: str
    shards: int
    fused_attention: bool
    zero: int
    fully_sharded: bool
    assumed: tuple[str, ...]


def setting_of(row: dict[str, Any]) -> Setting:
    """What to predict.

    Raises:
        NotPredictedError: the row lacks what decides, or has what no rule covers.
    """
    model, assumed = row["model"], list[str]()
    if model.get("kind") != "dense":
        raise NotPredictedError(f"no dense transformer: {model.get('kind')}")
    names = ("layers", "hidden", "heads", "ffn", "vocab", "seq")
    numbers = [model.get(name) for name in names]
    numbers += [row[name] for name in ("tp", "pp", "dp", "micro_batch", "num_microbatches")]
    if not all(isinstance(number, int) for number in numbers):
        raise NotPredictedError("its shape or layout is not all known")
    stack = next((s for start, s in _STACKS.items() if row["id"].startswith(start)), None)
    if stack is None:
        raise NotPredictedError("a software that the catalogue lacks")
    if row.get("torch_compile"):
        stack = "compiled"
    if row["schedule"] not in _SCHEDULES:
        raise NotPredictedError(f"a schedule that is not known: {row['schedule']}")
    device = _device(row)
    zero = str(row.get("zero"))
    if zero == "unknown":
        assumed.append("zero")
        zero = "1" if stack in _MODERN else "0"
    return Setting(
        row, device, _host(row, device, assumed), stack, _arithmetic(row, device),
        _recompute(row, assumed), _shards(row, assumed), _fused(row, assumed),
        1 if zero.startswith(("1", "2", "DDP")) else 0,
        "FSDP" in zero, tuple(assumed),
    )  # fmt: skip


def _device(row: dict[str, Any]) -> Hardware:
    name = row["device"].split(" ")[0].lower()
    name = {"a100-class": "a100-sxm", "v100-sxm-16gb": "v100-sxm2", "v100-sxm-32gb": "v100-sxm2",
            "gh200-96gb": "gh200"}.get(name, name)  # fmt: skip
    if row["id"].startswith("simumax-b200"):  # whose matmuls were measured by shape
        name = "b200-simumax"
    try:
        return catalogue.device_named(name)
    except pk.InputError as error:
        raise NotPredictedError(f"the catalogue has no {row['device']}") from error


def _host(row: dict[str, Any], device: Hardware, assumed: list[str]) -> HostSpec:
    host, _ = host_of(device.name)
    words = str(row.get("inter_link"))
    rate = _rate(words)
    if rate is None:
        if row["gpus"] > host.devices and "unknown" in words:
            assumed.append("network")
        return host
    card = replace(host.card, devices_per_card=1, bytes_per_second=Figure(rate, row["source"]))
    return replace(host, card=card)


def _rate(words: str) -> float | None:
    """Bytes per second of one GPU to other hosts, as a row says it."""
    if match := re.search(r"([\d.]+) GB/s per GPU", words):
        return float(match[1]) * 1e9
    if match := re.search(r"([\d.]+) Gbit/s per node", words):
        return float(match[1]) * 1e9 / 8 / 8
    if match := re.search(r"(\d+) x ([\d.]+) Gbit/s per node", words):
        return int(match[1]) * float(match[2]) * 1e9 / 8 / 8
    if match := re.search(r"(\d+) Omni-Path links per node", words):
        return int(match[1]) * 12.5e9 / 8
    return None


def _arithmetic(row: dict[str, Any], device: Hardware) -> str | None:
    precision = str(row["precision"]).lower()
    for word in ("fp4", "fp8", "float8"):
        if word in precision:
            kind = "fp8" if word == "float8" else word
            if kind not in device.flops_per_second:
                raise NotPredictedError(f"the catalogue has no {kind} peak of {device.name}")
            return kind
    if "fp32 in the run" in precision:
        raise NotPredictedError("fp32 or tf32 is not stated")
    return None


def _recompute(row: dict[str, Any], assumed: list[str]) -> str:
    said = str(row.get("recompute"))
    if said.startswith(("full", "on")):
        return "full"
    if said.startswith("selective (core"):
        return "core"
    if said.startswith("selective (per-op)"):
        return "per-op"
    if said.startswith("unknown"):
        assumed.append("recompute")
    elif said.startswith("selective"):
        raise NotPredictedError("recomputes parts that no rule covers")
    return "none"


def _shards(row: dict[str, Any], assumed: list[str]) -> int:
    said = row.get("sp")
    if said == "unknown" and row["tp"] > 1:
        assumed.append("sequence parallelism")
        said = row["date"] >= "2022-06"
    return row["tp"] if said is True else 1


def _fused(row: dict[str, Any], assumed: list[str]) -> bool:
    said = str(row.get("attention")).lower()
    if "unfused" in said:
        return False
    if "unknown" in said:
        assumed.append("attention")
        return row["date"] >= "2023-07"
    return True


class Predicted(NamedTuple):
    """A prediction: seconds of a step, and GiB of the fullest rank."""

    seconds: float
    gib: float


def predict(setting: Setting) -> Predicted:
    """What a row's run takes."""
    row, model = setting.row, setting.row["model"]
    tp, cp = row["tp"], row.get("cp") or 1
    width = model.get("head_dim") or model["hidden"] // model["heads"]
    shape = Shape(
        rows=row["micro_batch"], sequence=model["seq"] // cp, keys=model["seq"],
        hidden=model["hidden"], heads=max(1, model["heads"] // tp),
        kv_heads=max(1, (model.get("kv_heads") or model["heads"]) // tp), width=width,
        ffn=model["ffn"] // tp, vocab=-(-model["vocab"] // tp), shards=setting.shards,
        gated=bool(model.get("gated_mlp")), fused_attention=setting.fused_attention,
        dropout=0.1 if setting.stack in _OLD else 0.0,
    )  # fmt: skip
    costs = costs_of(shape, setting.device.name, setting.stack, setting.arithmetic)
    if setting.fully_sharded and row["pp"] == 1:
        return _fully_sharded(setting, costs)
    return _megatron(setting, costs)


def _activation_bytes(setting: Setting) -> float:
    row = setting.row
    tokens = row["micro_batch"] * row["model"]["seq"] / (row.get("cp") or 1)
    return tokens * row["model"]["hidden"] * 2


def _tensor_seconds(setting: Setting) -> float:
    """What the collectives of tensor ranks take in a forward of a block; a backward as much."""
    tp = setting.row["tp"]
    ring = CollectiveRing(setting.host, tp, min(tp, setting.host.devices))
    each = all_reduce_seconds(_activation_bytes(setting), ring)
    if setting.shards > 1:
        each = 2 * gather_seconds(_activation_bytes(setting), ring)
    exposed = catalogue.software_named(setting.stack).tensor_exposed.value
    return 2 * each * exposed if tp > 1 else 0.0


def _passes(setting: Setting, costs: Costs) -> tuple[float, float, float]:
    """(forward, input gradients, weight gradients) of a block with its collectives."""
    tensor, block = _tensor_seconds(setting), costs.block
    again = {"full": block.forward_seconds + tensor, "core": costs.core_seconds,
             "per-op": 0.5 * block.forward_seconds}.get(setting.recompute, 0.0)  # fmt: skip
    forward = block.forward_seconds + tensor
    return forward, block.backward_input_seconds + tensor + again, block.backward_weight_seconds


def _stage_layers(row: dict[str, Any], num_stages: int) -> list[int]:
    layers = row["model"]["layers"]
    if layers % num_stages and (layers + 2) % num_stages == 0:
        each = (layers + 2) // num_stages
        return [each - 1, *[each] * (num_stages - 2), each - 1]
    return [layers // num_stages + (index < layers % num_stages) for index in range(num_stages)]


def _megatron(setting: Setting, costs: Costs) -> Predicted:
    row = setting.row
    per_rank = row.get("chunks_per_rank") or 1
    family = _SCHEDULES[row["schedule"]]
    if family == "zb-v":
        per_rank = 2
    counts = _stage_layers(row, row["pp"] * per_rank)
    forward, inward, weight = _passes(setting, costs)
    stages = [[n * forward, n * inward, n * weight] for n in counts]
    for place, part in ((0, costs.embedding), (-1, costs.head)):
        for index, seconds in enumerate(
            (part.forward_seconds, part.backward_input_seconds, part.backward_weight_seconds)
        ):
            stages[place][index] += seconds
    leaves = row["gpus"] > setting.host.devices
    hop = hop_seconds(_activation_bytes(setting) / row["tp"], setting.host, leaves_host=leaves)
    steps = _simulated(
        family, row["pp"], row["num_microbatches"], per_rank,
        tuple(map(tuple, stages)), hop if row["pp"] > 1 else 0.0,
    )  # fmt: skip
    parameters = _rank_parameters(setting, costs, max(counts) * per_rank)
    return Predicted(
        steps + _reduce_seconds(setting, parameters) + _update_seconds(setting, parameters),
        _gib(setting, costs, max(counts) * per_rank, parameters),
    )


@functools.lru_cache(None)
def _simulated(
    family: str, ranks: int, microbatches: int, per_rank: int,
    stages: tuple[tuple[float, ...], ...], hop: float,
) -> float:  # fmt: skip
    if ranks == 1 and len(stages) == 1:
        return microbatches * sum(stages[0])
    options = {"stages_per_rank": per_rank} if family == "interleaved-1f1b" else {}
    few = min(microbatches, 4 * ranks)
    if few < microbatches:
        # After warm-up every microbatch takes as long as the one before.
        first, second = (
            _simulated(family, ranks, count, per_rank, stages, hop) for count in (3 * ranks, few)
        )
        return second + (microbatches - few) * (second - first) / (few - 3 * ranks)
    schedule = pk.schedules.build(family, num_ranks=ranks, num_microbatches=few, **options)
    forward, inward, weight = zip(*stages, strict=True)
    costs = pk.Costs(
        forward=list(forward), backward_input=list(inward), backward_weight=list(weight), hop=hop
    )
    return pk.simulate(schedule, costs).makespan


def _rank_parameters(setting: Setting, costs: Costs, num_layers: int) -> float:
    """Numbers of the fullest rank, of 2 bytes in the estimate."""
    ends = costs.embedding.parameter_bytes
    if setting.row["pp"] == 1:
        ends += 0 if setting.row["model"].get("tied_embeddings", True) else ends
    return (num_layers * costs.block.parameter_bytes + ends) / 2


def _data_ring(setting: Setting) -> CollectiveRing:
    row = setting.row
    apart = row["tp"] * (row.get("cp") or 1)
    size, devices = row["dp"] * (row.get("cp") or 1), min(setting.host.devices, row["gpus"])
    per_host = max(1, min(size, devices // max(1, row["tp"])))
    return CollectiveRing(
        setting.host, size, per_host, max(1, devices // per_host // max(1, 1 * bool(apart)))
    )


def _reduce_seconds(setting: Setting, parameters: float) -> float:
    ring = _data_ring(setting)
    overlapped = setting.stack in _MODERN and "off" not in str(setting.row.get("overlap"))
    wide = "fp32 grad" in str(setting.row["precision"]) or setting.stack in _MODERN
    if setting.zero:
        seconds = gather_seconds(parameters * (4 if wide else 2), ring)
        seconds += gather_seconds(parameters * 2, ring)
    else:
        seconds = all_reduce_seconds(parameters * (4 if wide else 2), ring)
    return seconds * (0.2 if overlapped else 1.0)


_UPDATE_BYTES = 28
"""An update moves, per parameter: three numbers of 4 bytes twice, a gradient and a weight of 2."""


def _update_seconds(setting: Setting, parameters: float) -> float:
    rate = setting.device.memory_bytes_per_second.value * setting.device.efficiency.memory.value
    holders = _data_ring(setting).size if setting.zero or setting.fully_sharded else 1
    return parameters / holders * _UPDATE_BYTES / rate


def _gib(setting: Setting, costs: Costs, num_layers: int, parameters: float) -> float:
    row = setting.row
    holders = _data_ring(setting).size if setting.zero else 1
    gradient = 4 if "fp32" in str(row["precision"]) or setting.stack in _MODERN else 2
    state = parameters * (2 + gradient + 12 / holders)
    in_flight = min(row["num_microbatches"], row["pp"])
    each = costs.block.activation_bytes
    if setting.recompute == "full":
        each = costs.block.output_bytes
    elif setting.recompute == "core":
        each -= costs.core_bytes
    kept = num_layers * each * in_flight
    head = costs.head.activation_bytes if row["pp"] == 1 else 0
    return (state + kept + head) / 2**30


def _fully_sharded(setting: Setting, costs: Costs) -> Predicted:
    """Weights are gathered for each block, forward and backward, while the one before computes."""
    row = setting.row
    ring = _data_ring(setting)
    forward, inward, weight = _passes(setting, costs)
    gather = gather_seconds(costs.block.parameter_bytes, ring)
    reduced = gather_seconds(costs.block.parameter_bytes * (2 if "titan" in row["id"] else 1), ring)
    layers = row["model"]["layers"]
    step = layers * (max(forward, gather) + max(inward + weight, gather + reduced))
    ends = costs.embedding.compute_seconds + costs.head.compute_seconds
    parameters = _rank_parameters(setting, costs, layers)
    holders = max(1, ring.size)
    seconds = row["num_microbatches"] * (step + ends) + _update_seconds(setting, parameters)
    kept = layers * _kept_bytes(setting, costs)
    memory = parameters * 16 / holders + kept
    memory += costs.head.activation_bytes + costs.head.workspace_bytes
    memory += 2 * costs.block.parameter_bytes
    return Predicted(seconds, memory / 2**30)


def _kept_bytes(setting: Setting, costs: Costs) -> float:
    """What a block keeps of a microbatch under fully sharded weights."""
    if setting.recompute == "full":
        return costs.block.output_bytes
    if setting.recompute != "per-op":
        return costs.block.activation_bytes
    # Every second matrix product's output, the attention's, and the block's own.
    model, width = setting.row["model"], costs.block.output_bytes
    kv = 2 * (model.get("kv_heads") or model["heads"]) / model["heads"]
    products = 3 + kv + 2 * model["ffn"] / model["hidden"]
    return width * (2 + products / 2)


def measured_seconds(row: dict[str, Any]) -> float:
    """The seconds of a step as the row has them.

    Raises:
        NotPredictedError: it has none.
    """
    said = row["measured"].get("step_ms") or row.get("derived", {}).get("step_ms")
    if not isinstance(said, int | float) or not math.isfinite(said):
        raise NotPredictedError("no step time")
    return said / 1e3
