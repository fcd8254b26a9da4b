"""Every rank on the accelerator of its number on this host, and beside it all ranks as threads on
the CPU, or a single rank on that accelerator; then compares what it holds.

``python devices.py CASES TRANSPORT KIND FOLDER`` in a job; ``KIND`` is that of the accelerators.
"""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock import versions
from penstock.engine.model import tree
from tests.kit import streams
from tests.kit.accelerator import collectives
from tests.kit.accelerator.devices import register
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.on_devices import EMULATED, Places, hardware
from tests.kit.training import sgd
from tests.numerics.test_one_logical_model_shared import TiedGPT, UNet, picture_batch, token_batch

DEADLINE_SECONDS = 300


def make_deep_net():
    """Enough layers for four ranks with two stages each; what passes between them is no dense
    row-major tensor everywhere."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


class OddValues(nn.Module):
    """Hands on what some libraries do not take: other dtypes, views with gaps, nothing at all."""

    def forward(self, value):
        return {
            "even": value[:, ::2],
            "odd": value[:, 1::2],
            "transposed": value.t(),
            "expanded": value[:, :1].expand(-1, 3),
            "mask": value.detach() > 0,
            "complex": torch.complex(value.detach(), -value.detach()).conj(),
            "count": torch.arange(3, device=value.device),
            "nothing": value[:0],
            "in main memory": torch.linspace(1, 2, 16),
            "number": 3,
        }


class Together(nn.Module):
    def forward(self, values):
        wanting = {
            name for name, value in values.items() if torch.is_tensor(value) and value.requires_grad
        }
        trained = {"even", "odd", "transposed", "expanded", "nothing"}
        assert wanting == (trained if torch.is_grad_enabled() else set()), wanting
        value = torch.stack([values["even"], values["odd"]], 2).flatten(1)
        value = value + values["transposed"].t() * values["mask"] + values["nothing"].sum()
        value = value * values["complex"].imag.sign() + values["expanded"].sum(1, keepdim=True)
        value = value * values["in main memory"]
        return value * values["number"] + values["count"].sum()


def make_odd_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), OddValues(), Together(), nn.Linear(16, 4))


def flat_loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


TIED = {"build": TiedGPT, "batch": partial(token_batch, 8), "loss": flat_loss}
SKIPS = {"build": UNet, "batch": partial(picture_batch, 8), "loss": F.mse_loss}
DEEP = {"build": make_deep_net}
CASES = {
    "one": {"1f1b": {}},
    "library alone": {"1f1b": {}},
    "two": {
        "1f1b": {},
        "zb-v": {"clip_norm": 0.1},
        "chimera": {},
        "gpipe": {"clip_norm": 0.1, "post_validate": True},
    },
    "two linked": {
        "interleaved-1f1b": {},
        "breadth-first": {},
        "1f1b": {"build": make_odd_net},
        "zb-v": TIED,
        "gpipe": SKIPS,
        "chimera": TIED,
        "stash": {"policy": versions.Stash()},
    },
    "four": {
        "1f1b": DEEP,
        "interleaved-1f1b": DEEP,
        "zb-v": DEEP,
        "gpipe": SKIPS,
        "replicas": {"policy": versions.Stash(), "replicas": "2-2"},
    },
}


def planned(schedule, model, policy, replicas, num_ranks):
    if policy is None:
        return make_plan(model, num_ranks, 4, schedule)
    return streams.plan_for(
        policy, None if replicas else num_ranks, microbatches=4, replicas=replicas
    )


def trained(
    schedule: str,
    kind: str,
    transport: str,
    places: Places,
    *,
    num_ranks=None,
    build=make_mlp,
    batch=make_batch,
    loss=F.cross_entropy,
    policy=None,
    replicas=None,
    **options,
):
    """The losses of some steps, the outputs of an evaluation, the pipeline's weights and what it
    tells of its transport."""
    if policy is not None:
        build, loss = streams.layered_model, F.mse_loss
        options["optimizer"] = partial(torch.optim.SGD, lr=0.01)
    model = build()
    plan = planned(schedule, model, policy, replicas, num_ranks or dist.get_world_size())
    devices = tuple(pk.Device(name=f"{kind}{rank}", kind=kind) for rank in range(plan.num_ranks))
    with pk.Pipeline(
        model,
        replace(plan, devices=devices),
        loss=loss,
        seed=3,
        transport=transport,
        deadline_seconds=DEADLINE_SECONDS,
        **{"optimizer": places.optimizer, **options},
    ) as pipeline:
        if transport != "threads" and dist.get_backend() == "gloo":
            dist.barrier()  # ranks may do other things together once they have a pipeline
        if policy is None:
            losses = [pipeline.step(*batch(seed=step)) for step in range(2)]
            losses += pipeline.steps(batch(seed=step) for step in range(2))
            losses.append(pipeline.evaluate(batch(seed=0)[0]))
        else:
            losses = [*pipeline.steps(streams.batches([8] * 5))]
        state = pipeline.state_dict()
    return [value.cpu() for value in tree.tensors(losses)], state, pipeline.transport


def differences(cases: str, transport: str, places: Places) -> list[str]:
    """What is not as equal as it must be, or not where it should be."""
    found = []
    (own,) = places.of(dist.get_rank())
    for schedule, options in CASES[cases].items():
        ours, state, told = trained(schedule, "gpu", transport, places, **options)
        if places.on_cpu:
            theirs, whole, _ = trained(schedule, "cpu", "threads", places, **options)
        else:
            alone = {**options, "num_ranks": 1, "devices": own}
            theirs, whole, _ = trained("1f1b", "gpu", "threads", places, **alone)
        if not all(map(places.are_equal, ours, theirs)):
            found.append(f"{schedule}: losses or outputs")
        on = {str(value.device) for value in state.values()}
        if on != {own}:
            found.append(f"{schedule}: on {on}")
        if ("straight from device to device" in told) != (transport == "auto"):
            found.append(f"{schedule}: {told}")
        for key, value in state.items():
            if not places.are_equal(value.cpu(), whole[key].cpu()):
                found.append(f"{schedule}: {key}")
    return found


def apart(transport: str, places: Places) -> list[str]:
    """Ranks whose devices no library links: what is not equal to the bit, or not told."""
    kind = places.kind
    theirs, _, _ = trained("1f1b", "cpu", "threads", places)
    found = []
    for devices, why in (
        ([f"{kind}:0", f"{kind}:0"], f"between ranks 0 and 1 (both compute on {kind}:0)"),
        (["cpu", f"{kind}:1"], "between ranks 0 and 1 (rank 0 computes on the CPU)"),
    ):
        ours, _, told = trained("1f1b", "gpu", transport, places, devices=devices)
        if not all(map(torch.equal, ours, theirs)):
            found.append(f"{devices}: losses or outputs")
        if why not in told:
            found.append(f"{devices}: {told}")
    return found


class Failing(nn.Module):
    """Raises in its third forward."""

    num_forwards = 0

    def forward(self, value):
        self.num_forwards += 1
        if self.num_forwards == 3:
            raise ValueError("boom")
        return value


def failing(transport: str, places: Places) -> list[str]:
    """What this rank is told when the last layer raises, with messages under way; another pipeline
    trains afterwards."""
    told = []
    try:
        trained(
            "gpipe", "gpu", transport, places, build=lambda: nn.Sequential(*make_mlp(), Failing())
        )
    except pk.errors.RunError as error:
        told.append(str(error))
    return told + differences("one", transport, places)


def refused(transport: str, places: Places) -> list[str]:
    """What users are told where the library cannot connect two devices; they train all the same."""

    def no_route(*_):
        raise RuntimeError("no route to the other device")

    collectives.PATIENCE = timedelta(seconds=1)
    collectives.Library.send = no_route
    theirs, _, _ = trained("1f1b", "cpu", "threads", places)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        ours, _, told = trained("1f1b", "gpu", transport, places)
    assert all(map(torch.equal, ours, theirs))
    return [told, *(str(warning.message) for warning in warned)]


def waits(transport: str, places: Places) -> dict[str, int]:
    """How often the host waited for its device in some steps, how many bytes went to another
    device meanwhile, and how often it had to connect first."""
    module, device = torch.get_device_module(), dist.get_rank()
    # Not pinned: the host would wait until those have been read, as ``test_devices`` counts.
    model, batches = make_mlp(dropout=0.0), [make_batch(seed=seed) for seed in range(4)]
    plan = make_plan(model, 2, 4, "1f1b")
    planned_on = tuple(pk.Device(name=f"gpu{rank}", kind="gpu") for rank in range(2))
    options = {"loss": F.cross_entropy, "optimizer": sgd, "record": False, "results": "none"}
    options |= {"transport": transport, "deadline_seconds": DEADLINE_SECONDS}
    with pk.Pipeline(model, replace(plan, devices=planned_on), **options) as pipeline:
        num_connected = collectives.DONE.num_connected
        pipeline.step(*batches[0])
        before = collectives.DONE.num_bytes_sent
        module.reset_host_counts(device)
        for batch in batches:
            pipeline.step(*batch)
        list(pipeline.steps(batches))
        counts = {"reads": module.host_reads(device), "waits": module.host_waits(device)}
        counts["bytes"] = collectives.DONE.num_bytes_sent - before
        counts["connected"] = collectives.DONE.num_connected - num_connected
        module.check()
    return counts


def one_way(transport: str, places: Places) -> list[int]:
    """The bytes in use on this rank's device after each of some evaluations, in which tensors go to
    the other rank and none comes back."""
    module, device = torch.get_device_module(), dist.get_rank()
    model, taken = make_mlp(dropout=0.0), []
    plan = make_plan(model, 2, 4, "1f1b")
    planned_on = tuple(pk.Device(name=f"gpu{rank}", kind="gpu") for rank in range(2))
    options = {"loss": F.cross_entropy, "optimizer": sgd, "transport": transport}
    options |= {"results": "none", "deadline_seconds": DEADLINE_SECONDS}
    with pk.Pipeline(model, replace(plan, devices=planned_on), **options) as pipeline:
        for _ in range(3):
            for step in range(20):
                pipeline.evaluate(make_batch(seed=step)[0])
            module.synchronize(device)
            taken.append(module.memory_allocated(device))
    return taken


def main() -> None:
    torch.set_num_threads(1)
    cases, transport, kind, folder = sys.argv[1:]
    if kind == EMULATED.kind:
        register()
        collectives.register()
    # As scripts for GPUs do it, whose default group is NCCL's and takes nothing in main memory.
    dist.init_process_group(collectives.LIBRARY if cases == "library alone" else "gloo")
    places = EMULATED if kind == EMULATED.kind else hardware(kind, 2)
    jobs = {
        "one way": one_way,
        "waits": waits,
        "apart": apart,
        "failing": failing,
        "refused": refused,
    }
    told = jobs.get(cases, partial(differences, cases))(transport, places)
    if kind == EMULATED.kind:
        torch.get_device_module().check()
    Path(folder, f"report-{dist.get_rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
