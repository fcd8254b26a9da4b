"""DeepSpeed trains on processes of the CPU by plans that were handed over to it; run by torchrun in
its environment, which has no Penstock.

    speed.py FOLDER

has a folder for each plan, into which ranks write their reports.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

WIDTH, RATE = 8, 0.5


def build_model(layers):
    """Linear layers between activations, with the names that the plan has."""
    torch.manual_seed(0)
    model = nn.Module()
    for path in layers:
        *parents, name = path.split(".")
        parent = model
        for part in parents:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(name, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return model


def report_of(folder):
    spec = importlib.util.spec_from_file_location("plan", folder / "deepspeed_plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = json.loads((folder / "ds_config.json").read_text())
    config["zero_allow_untested_optimizer"] = True  # plain SGD shows gradients
    layers = [name for names in module.STAGES for name in names]
    alone = build_model(layers)
    net = module.pipeline_module(copy.deepcopy(alone), loss_fn=F.mse_loss)
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=RATE)
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=weights, config=config, optimizer=optimizer
    )
    rows = config["train_batch_size"]
    torch.manual_seed(1)
    inputs, targets = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    step = config["train_micro_batch_size_per_gpu"]
    copies = rows // (step * config["gradient_accumulation_steps"])
    own = range(engine.grid.get_data_parallel_rank(), rows // step, copies)
    batches = [(inputs[n * step : (n + 1) * step], targets[n * step : (n + 1) * step]) for n in own]
    loss = engine.train_batch(data_iter=iter(batches))

    def forward(value):
        for name in layers:
            value = alone.get_submodule(name)(value)
        return value

    whole = F.mse_loss(forward(inputs), targets)
    whole.backward()
    wanted = {name: weight - RATE * weight.grad for name, weight in alone.named_parameters()}
    before, held = dict(alone.named_parameters()), {}
    for key, weight in net.named_parameters():
        _, name = key.split(".", 1)
        held[name.replace("/", ".")] = weight
    return {
        "zero": engine.zero_optimization_stage(),
        "micro_batches": engine.micro_batches,
        "held": sorted({name.rsplit(".", 2)[0] for name in held}),
        "loss": loss.item(),
        "alone": whole.item(),
        "wrong": [
            name
            for name, weight in held.items()
            if not torch.allclose(weight, wanted[name], rtol=1e-4, atol=1e-6)
        ],
        "moved": max((wanted[name] - before[name]).abs().max().item() for name in held),
    }


def main() -> None:
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        report = report_of(folder)
        (folder / f"report-{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort where groups of several plans are taken down


if __name__ == "__main__":
    main()
