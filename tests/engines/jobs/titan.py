"""torchtitan trains its own Llama on processes of the CPU by plans that were handed over to it; run
by torchrun in torchtitan's environment, which has no Penstock.

    titan.py FOLDER

has a folder for each plan, into which ranks write their reports.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchtitan.distributed.parallel_dims as dims
from torch.distributed.fsdp import FSDPModule
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

LENGTH, VOCABULARY = 32, 2048
WRAPPED = "_checkpoint_wrapped_module."


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten()), None


def planned_config(folder):
    path = folder / "torchtitan_plan.py"
    spec = importlib.util.spec_from_file_location("torchtitan_plan", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = llama3_debugmodel()
    # flex attention has no backward on a CPU
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    config.model_spec.model = llama3.llama3_configs["debugmodel"](attn_backend="")
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"  # which shards plain tensors
    return module.planned(config)


def build(config):
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    for number, parameter in enumerate(model.parameters()):
        torch.manual_seed(number)
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def parallelize(model, *, ac_config, dump_folder, parallel_dims, **others):
    """What torchtitan's own function does where nothing is sharded, or else that itself."""
    if parallel_dims.dp_replicate * parallel_dims.dp_shard > 1:
        llama3.parallelize_llama(
            model,
            ac_config=ac_config,
            dump_folder=dump_folder,
            parallel_dims=parallel_dims,
            **others,
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo cannot multiply while it sums
                module.set_force_sum_reduction_for_comms(True)
        return model
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    return model


def batch(count):
    torch.manual_seed(1)
    shape = count, LENGTH
    return torch.randint(0, VOCABULARY, shape), torch.randint(0, VOCABULARY, shape)


def whole_of(gradient):
    """A gradient that copies may share, whole."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def report_of(folder, size):
    """What torchtitan makes of a plan, beside the whole model on one device."""
    config = planned_config(folder)
    parallelism = config.parallelism
    mesh = dims.ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=1, tp=1, ep=1, pp=parallelism.pipeline_parallel_degree, world_size=size,
        spmd_backend=parallelism.spmd_backend,
    )  # fmt: skip
    mesh.build_mesh()
    whole = build(config)
    schedule, parts, has_first, has_last = config.model_spec.pipelining_fn(
        copy.deepcopy(whole),
        parallel_dims=mesh,
        training=config.training,
        parallelism=parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=str(folder),
        device=torch.device("cpu"),
        model_config=config.model_spec.model,
        parallelize_fn=parallelize,
        loss_fn=loss_fn,
    )
    count, rows = config.training.local_batch_size, parallelism.pipeline_parallel_microbatch_size
    copies = mesh.dp_replicate * mesh.dp_shard
    copy_of = mesh.get_mesh("batch").get_local_rank() if copies > 1 else 0
    all_inputs, all_targets = batch(count * copies)
    own = slice(copy_of * count, (copy_of + 1) * count)
    inputs, targets = all_inputs[own], all_targets[own]
    losses = [] if has_last else None
    schedule.step(
        *([inputs] if has_first else []), target=targets if has_last else None, losses=losses
    )
    alone = [
        loss_fn(whole(all_inputs[first : first + rows]), all_targets[first : first + rows])[0]
        for first in range(0, count * copies, rows)
    ]
    torch.stack(alone).sum().backward()
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    own_parameters = [pair for part in parts for pair in part.named_parameters()]
    gradients = {
        name.replace(WRAPPED, ""): whole_of(weight.grad) for name, weight in own_parameters
    }
    first = copy_of * count // rows
    pipeline_rank = mesh.get_mesh("pp").get_local_rank()
    order = schedule.pipeline_order[pipeline_rank]
    return {
        "pipeline_rank": pipeline_rank,
        "parameters": sorted(gradients),
        "missing": sorted({*wanted} - {*gradients}),
        "wrong": [
            name
            for name, gradient in gradients.items()
            if not torch.allclose(gradient, wanted[name], rtol=1e-4, atol=1e-6)
        ],
        "largest": max(gradient.abs().max().item() for gradient in gradients.values()),
        "losses": [loss.item() for loss in losses or ()],
        "alone": [loss.item() for loss in alone[first : first + count // rows]],
        "order": [str(act) for act in order if act],
        "recomputes": any(WRAPPED in name for name, _ in own_parameters),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    dims.device_type = "cpu"
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        report = report_of(folder, size)
        (folder / f"report-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
