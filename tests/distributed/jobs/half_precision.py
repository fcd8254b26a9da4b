"""Copies of stages in processes, with weights in half precision, beside one device by hand; and
what ranks hold, beside what their plan says.

    torchrun ... half_precision.py CASE FOLDER

Cases: ``by hand`` compares losses and weights, reducer by reducer, and with torch's own policy;
``checkpoint`` goes on from one layout in another; ``memory`` weighs weights, gradients, optimizer
state and activations, ``all memory`` in every case. Each rank reports in ``report-<rank>.json``.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import penstock as pk
from penstock.core.cluster import SpareMachine
from penstock.demo.gpt import GPT, loss
from penstock.planning.plans import Plan
from penstock.planning.plans.summing import server_ranks
from tests.kit.cases import run_case
from tests.kit.half_precision import MixedByHand, bytes_of, bytes_per_parameter, turns_of
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.reducing import replicated
from tests.kit.sharing import spread
from tests.kit.training import adamw

HALF = torch.bfloat16
STEPS = 4
mixed = pk.optimizers.master_weights(adamw)


def hybrid(plan: Plan) -> Plan:
    """Sharded over ranks 0 and 1, and over 2 and 3."""
    sharded = plan.with_reducer("fully-sharded", gathered_for="use")
    return sharded.edited(summing=replace(sharded.summing, levels=((0, 0, 1, 1),)))


WAYS = {
    "owners": lambda plan: plan,
    "sharded": lambda plan: plan.with_reducer("sharded"),
    "fully-sharded": lambda plan: plan.with_reducer("fully-sharded"),
    "freed behind each use": lambda plan: plan.with_reducer("fully-sharded", gathered_for="use"),
    "all-reduce": lambda plan: plan.with_reducer("all-reduce"),
    "servers": lambda plan: plan.with_reducer("servers"),
    "parameter-server": lambda plan: plan.with_reducer("parameter-server"),
    "hybrid": hybrid,
}


def model_of(dtype=HALF):
    return make_mlp(dropout=0.0, dtype=dtype)


def pipeline_of(plan: Plan, model, **options) -> pk.Pipeline:
    return pk.Pipeline(
        model, plan, **{
            "loss": F.cross_entropy, "optimizer": mixed, "deadline_seconds": 300,
            "startup_seconds": 300, **options,
        },
    )  # fmt: skip


def differences(name, losses, weights, wanted, others, exact=True) -> list[str]:
    found = [f"{name}: losses {losses}, wanted {wanted}"] * (exact and losses != wanted)
    for key, value in others.items():
        same = torch.equal if exact else partial(torch.allclose, rtol=2**-6, atol=2**-8)
        if weights[key].dtype != value.dtype or not same(weights[key], value):
            found.append(f"{name}: {key}")
    return found


def by_hand() -> list[str]:
    """To the bit but where the order of sums is the library's."""
    whole = [name for name in WAYS if name not in {"hybrid", "parameter-server"}]
    cases = [((2, 2), name, HALF, {}) for name in whole]
    cases += [((4,), name, HALF, {}) for name in ("sharded", "fully-sharded", "hybrid")]
    cases += [((2, 1), "parameter-server", HALF, {})]
    cases += [
        ((2, 2), name, torch.float16, {"scale": 1024.0})
        for name in ("owners", "sharded", "freed behind each use")
    ]
    found = []
    for replicas, name, dtype, options in cases:
        plan = replicated(model_of(dtype), replicas, 4 * max(replicas))
        ((wanted, state),) = spread([partial(by_one_hand, plan, dtype, **options)])
        batches = [make_batch(24, dtype, step) for step in range(STEPS)]
        given = {}
        if options:
            given["grad_scaler"] = torch.amp.GradScaler("cpu", init_scale=options["scale"])
        with pipeline_of(WAYS[name](plan), model_of(dtype), **given) as pipeline:
            losses = [pipeline.step(*batch).item() for batch in batches]
            weights = pipeline.gather_state_dict()
        exact = name not in {"all-reduce", "servers", "hybrid"}  # which add in another order
        found += differences(f"{name} {dtype}", losses, weights, wanted, state, exact)
    return found + by_policy()


def by_policy() -> list[str]:
    """A loop around ``fully_shard`` with torch's policy trains the same; gloo adds in any order."""
    copies, losses = dist.get_world_size(), []
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)
    model = model_of().float()
    for module in (*(own for own in model if [*own.parameters()]), model):
        fully_shard(module, mesh=init_device_mesh("cpu", (copies,)), mp_policy=policy)
    optimizer = adamw(model.parameters())
    batches = [make_batch(24, HALF, step) for step in range(STEPS)]
    for batch in batches:
        inputs, targets = (own.chunk(copies)[dist.get_rank()] for own in batch)
        value = F.cross_entropy(model(inputs), targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = value.detach().float()
        dist.all_reduce(total)
        losses.append(total.item() / copies)
    wanted = {key: own.full_tensor().to(HALF) for key, own in model.state_dict().items()}
    plan = WAYS["freed behind each use"](replicated(model_of(), (copies,), copies))
    with pipeline_of(plan, model_of()) as pipeline:
        ours = [pipeline.step(*batch).item() for batch in batches]
        weights = pipeline.gather_state_dict()
    far = max(abs(own - other) for own, other in zip(ours, losses, strict=True))
    found = [f"torch's policy: losses {ours}, wanted {losses}"] * (far > 2**-7)
    return found + differences("torch's policy", ours, weights, losses, wanted, exact=False)


def by_one_hand(plan: Plan, dtype, **options) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights."""
    model = model_of(dtype)
    hand = MixedByHand(model, plan.num_microbatches, adamw, turns=turns_of(plan), **options)
    losses = [hand.step(*make_batch(24, dtype, step)).item() for step in range(STEPS)]
    return losses, model.state_dict()


def checkpoint(folder: Path) -> list[str]:
    """Masters stay what they are from one layout to the next; sums are those of the layout."""
    found = []
    model = model_of()
    hand = MixedByHand(model, 8, adamw)
    layouts = [
        ("1f1b", (2, 2), "sharded"), ("1f1b", (4,), "freed behind each use"),
        ("1f1b", (1, 3), "fully-sharded"), ("1f1b", (3, 1), "owners"),
    ]  # fmt: skip
    for number, (_, replicas, name) in enumerate(layouts):
        plan = replicated(model_of(), replicas, 12)
        hand.num_microbatches, hand.turns = 12, turns_of(plan)
        with pipeline_of(WAYS[name](plan), model_of()) as pipeline:
            if (pipeline.load(folder) or 0) != 2 * number:
                found.append(f"{name}: begins elsewhere")
            for step in (2 * number, 2 * number + 1):
                batch = make_batch(24, HALF, step)
                own, wanted = pipeline.step(*batch).item(), hand.step(*batch).item()
                # Stages with other numbers of copies add their gradients in another order.
                if abs(own - wanted) > 2**-7 * abs(wanted):
                    found.append(f"{name}, step {step}: {own}, wanted {wanted}")
            pipeline.save(folder)
            weights = pipeline.gather_state_dict()
        found += differences(name, [], weights, [], model.state_dict(), exact=False)
        dist.barrier()
    return found


WIDTH, LENGTH, ROWS = 128, 16, 1


def gpt(dtype) -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=64, width=WIDTH, heads=2, layers=6, context=LENGTH).to(dtype)


def tokens(rows):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 64, (2, rows, LENGTH), generator=generator).unbind()


REDUCERS = ["owners", "sharded", "all-reduce", "fully-sharded step", "fully-sharded use"]
COPIED = ["gpipe 2-2 never", "1f1b 2-2 layers", "1f1b 2-2 stage"]
ALONE = ["zb-h1 1-1-1-1 never", "interleaved-1f1b 1-1-1-1 layers"]
SERVED = "parameter-server", "1f1b 2-1 never"


def cases(turn: int, every: bool) -> list[tuple[str, str]]:
    """Reducers, and how the plan is besides. Unless it is to be every case, each reducer meets one
    way, and in the first turn only some do."""
    if every:
        return [
            *itertools.product(REDUCERS, COPIED),
            *itertools.product(REDUCERS[:1], ALONE),
            SERVED,
        ]
    ways = itertools.islice(itertools.cycle(COPIED), turn, None)
    copied = [*zip(REDUCERS, ways, strict=False)]
    return [*(copied if turn else copied[1::3]), (REDUCERS[0], ALONE[turn]), SERVED]


def memory(*, every: bool = False) -> list[str]:
    """What each rank holds of everything is what the plan says, within 3 %."""
    found = []
    for turn, dtype in enumerate((torch.float32, HALF)):
        own = cases(turn, every)
        (graph,) = spread([partial(profiled, dtype)])
        plans = spread([partial(plan_for, graph, reducer, *how.split()) for reducer, how in own])
        for (reducer, how), plan in zip(own, plans, strict=True):
            found += [f"{reducer} {dtype} {how}: {wrong}" for wrong in weighed(plan, dtype)]
    return found


def profiled(dtype) -> pk.LayerGraph:
    inputs, targets = tokens(ROWS)
    return pk.profile(
        gpt(dtype), inputs, targets=targets, loss=loss, repeats=1, ranks=0, optimizer=mixed
    )


def plan_for(graph, reducer, schedule, replicas, recompute) -> Plan:
    name, *kept = reducer.split()
    copies = tuple(map(int, replicas.split("-")))
    stages = 8 if schedule.startswith("interleaved") else 4
    cluster = pk.Cluster.local(4)
    if name == "parameter-server":
        cluster = replace(cluster, spares=(SpareMachine(name="here", bytes_per_second=1e9),))
    return pk.plan(
        graph, cluster, microbatches=8, schedule=schedule, recompute=recompute,
        **({"replicas": copies, "cuts": [4]} if max(copies) > 1 else {"stages": stages}),
        **({"reducer": name, "gathered_for": kept[0]} if kept else {"reducer": name}),
    )  # fmt: skip


def weighed(plan: Plan, dtype) -> list[str]:
    """Where what a rank holds is not as planned."""
    rank = dist.get_rank()
    if rank in server_ranks(plan):
        with pipeline_of(plan, gpt(dtype), loss=loss, count_memory=True) as pipeline:
            for _ in range(2):
                pipeline.step(*tokens(8 * ROWS))
        return []
    parts = plan.memory_parts[rank]
    uses, model = plan.summing.gathered_for == "use", gpt(dtype)
    stages = [plan.stages[index] for index in plan.placement.stages_of[rank]]
    layers = [model.get_submodule(name) for stage in stages for name in stage.layers]
    seen, rows = {"weights": 0, "gradients": 0, "optimizer": 0}, []

    wholes: dict[int, torch.Tensor] = {}  # gathered ones, which keep gradients when they are freed

    def weigh(*_):
        weights = [weight for layer in layers for weight in layer.parameters()]
        wholes.update({id(own): own for own in weights if not isinstance(own, DTensor)})
        gradients = [own.grad for own in wholes.values() if own.grad is not None]
        seen["weights"] = max(seen["weights"], bytes_of([*map(local, weights), *rows]))
        seen["gradients"] = max(seen["gradients"], bytes_of(gradients))

    def look(_, inputs, output):
        weigh()
        if output.requires_grad:
            output.register_hook(weigh)

    for layer in layers:
        layer.register_forward_hook(look)
    options = {"loss": loss, "count_memory": not uses, "results": "every rank"}
    with pipeline_of(plan, model, **options) as pipeline:
        pipeline.step(*tokens(8 * ROWS))
        state = pipeline.optimizers.state
        rows += state
        pipeline.step(*tokens(8 * ROWS))
        kept = [value for own in state.values() for value in own.values()]
        seen["optimizer"] = bytes_of(filter(torch.is_tensor, kept))
        if not uses:
            seen["activations"] = pipeline.peaks[rank].activation_bytes
    wanted = parts._asdict()
    wanted["activations"] += wanted["recomputed"]
    if uses:  # the next layer's rows come meanwhile, into memory that is no parameter's
        wanted["weights"] -= max(bytes_of(own.parameters()) for own in gpt(dtype).spine())
    found = [
        f"{name}: {held}, planned {wanted[name]}"
        for name, held in seen.items()
        if abs(held - wanted[name]) > 0.03 * wanted[name]
    ]
    return found + (differs_from_page(plan, layers, seen) if dtype == HALF else [])


def differs_from_page(plan: Plan, layers, seen) -> list[str]:
    """Where what a rank holds is not what the page says."""
    sizes = [sum(own.numel() for own in layer.parameters()) for layer in layers]
    copies = len(plan.placement.ranks_of(plan.placement.stages_of[dist.get_rank()][0]))
    reducer, uses = plan.summing.reducer, plan.summing.gathered_for == "use"
    reducer = reducer if copies > 1 else "owners"  # a row with that of no reducer
    if reducer == "fully-sharded":
        reducer += f' "{plan.summing.gathered_for}"'
    told = bytes_per_parameter(reducer, copies, max(sizes) / sum(sizes))
    told["weights"] -= uses * 2 * max(sizes) / sum(sizes)  # as above
    return [
        f"{name}: {seen[name] / sum(sizes):.2f} bytes per parameter, the page says {size:.2f}"
        for name, size in told.items()
        if abs(seen[name] - size * sum(sizes)) > 0.03 * size * sum(sizes)
    ]


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    run_case(
        {
            "by hand": by_hand,
            "checkpoint": partial(checkpoint, Path(sys.argv[-1]) / "run"),
            "memory": memory,
            "all memory": partial(memory, every=True),
        }
    )
