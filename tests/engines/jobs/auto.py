"""NeMo AutoModel takes the recipes of plans that were handed over to it, cuts a Llama of
transformers by them and trains it on processes of the CPU; run by torchrun in its environment,
which has no Penstock.

    auto.py FOLDER

has a folder for each plan, into which ranks write their reports.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from nemo_automodel.components.distributed.pipelining.autopipeline import AutoPipeline
from nemo_automodel.recipes._dist_utils import parse_distributed_section
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, VOCABULARY = 16, 64
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager",
    "use_cache": False,
}  # fmt: skip


def loss_fn(output, target):
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def report_of(folder, rank):
    recipe = yaml.safe_load((folder / "automodel_plan.yaml").read_text())
    parsed = parse_distributed_section(recipe["distributed"])
    taken = parsed["pipeline_config"].to_dict()
    taken = {key: taken[key] for key in taken if key not in ("loss_fn", "dtype", "pp_schedule_csv")}
    torch.manual_seed(0)
    whole = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
    mesh = init_device_mesh("cpu", (parsed["pp_size"], 1), mesh_dim_names=("pp", "dp"))
    pipeline = AutoPipeline(
        world_mesh=mesh,
        pp_schedule_csv=str(folder / parsed["pipeline_config"].pp_schedule_csv),
        device=torch.device("cpu"),
        **taken,
    ).build(copy.deepcopy(whole), loss_fn=loss_fn)
    info = pipeline.info
    count = recipe["step_scheduler"]["local_batch_size"]
    torch.manual_seed(1)
    shape = count, LENGTH
    inputs, targets = torch.randint(0, VOCABULARY, shape), torch.randint(0, VOCABULARY, shape)
    losses = [] if info.has_last_stage else None
    info.schedule.step(
        *([inputs] if info.has_first_stage else []),
        target=targets if info.has_last_stage else None,
        losses=losses,
    )
    alone = [loss_fn(whole(row[None]), target) for row, target in zip(inputs, targets, strict=True)]
    torch.stack(alone).sum().backward()
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    gradients = {
        name: parameter.grad
        for part in info.model_parts
        for name, parameter in part.named_parameters()
    }
    return {
        "parameters": sorted(gradients),
        "wrong": [
            name
            for name, gradient in gradients.items()
            if not torch.allclose(gradient, wanted[name], rtol=1e-4, atol=1e-6)
        ],
        "largest": max(gradient.abs().max().item() for gradient in gradients.values()),
        "losses": [loss.item() for loss in losses or ()],
        "alone": [loss.item() for loss in alone],
        "order": [str(act) for act in info.schedule.pipeline_order[rank] if act is not None],
        "checkpointing": parsed["activation_checkpointing"],
    }


def main() -> None:
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        (folder / f"report-{rank}.json").write_text(json.dumps(report_of(folder, rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
