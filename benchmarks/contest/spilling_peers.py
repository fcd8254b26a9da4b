"""How others train what does not fit: offloading of FairScale, FSDP2, DeepSpeed and accelerate.

Each is used as its documentation shows, on one process and the CPU, with the model, optimizer and
minibatch of ``benchmarks.contest.spilling``. They need their libraries, which Penstock does not:

    pip install --target /tmp/peers --no-deps fairscale accelerate deepspeed …
    PYTHONPATH=/tmp/peers python -m benchmarks.contest.spilling --ways memory,spilled,peer:fairscale

A peer that cannot train here says so, and its own words are printed in the table.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.system import free_port
from penstock.demo.gpt import GPT, loss

Step = Callable[[Tensor, Tensor], Tensor]
"""Trains one minibatch and gives its loss."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """As in the prototype."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def plain_torch(model: GPT, folder: Path) -> Step:
    """The loop that everyone writes, all rows of the minibatch at once."""
    return _loop(model, adamw(model.parameters()))


def fairscale(model: GPT, folder: Path) -> Step:
    """``OffloadModel``: slices wait in main memory; on CPUs both sides are main memory."""
    from fairscale.experimental.nn.offload import OffloadModel

    cpu = torch.device("cpu")
    layers = nn.Sequential(*model.spine())
    offloaded = OffloadModel(
        model=layers, device=cpu, offload_device=cpu, num_slices=4, num_microbatches=1
    )
    return _loop(offloaded, adamw(offloaded.parameters()))


def fsdp2(model: GPT, folder: Path) -> Step:
    """``fully_shard`` with ``CPUOffloadPolicy``, a mesh of one CPU."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    policy = CPUOffloadPolicy(pin_memory=False)
    for layer in model.spine():
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return _loop(model, adamw(model.parameters()))


def _deepspeed(model: GPT, device: str, folder: Path) -> Step:
    os.environ |= {"DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    import deepspeed

    place = {"device": device, "nvme_path": str(folder)}
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config, dist_init_required=True
    )

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = loss(engine(inputs), targets)
        engine.backward(value)
        engine.step()
        return value.detach()

    return step


def deepspeed_memory(model: GPT, folder: Path) -> Step:
    """ZeRO-3 whose weights and optimizer state wait in main memory."""
    return _deepspeed(model, "cpu", folder)


def deepspeed_disk(model: GPT, folder: Path) -> Step:
    """ZeRO-3 whose weights and optimizer state wait on a disk (ZeRO-Infinity)."""
    return _deepspeed(model, "nvme", folder)


def accelerate(model: GPT, folder: Path) -> Step:
    """``disk_offload``: weights are read from a folder layer by layer."""
    from accelerate import disk_offload

    offloaded = disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return _loop(offloaded, adamw(offloaded.parameters()))


PEERS: dict[str, Callable[[GPT, Path], Step]] = {
    "torch": plain_torch,
    "fairscale": fairscale,
    "fsdp2": fsdp2,
    "deepspeed-memory": deepspeed_memory,
    "deepspeed-disk": deepspeed_disk,
    "accelerate": accelerate,
}


def peer(name: str, model: GPT, folder: str) -> Step:
    """A peer ready to train; its files lie in a folder of their own below ``folder``."""
    return PEERS[name](model, Path(tempfile.mkdtemp(dir=folder)))
