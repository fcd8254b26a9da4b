"""A ``LightningModule`` trained by Lightning's ``Trainer`` through a pipeline, beside the same
``Trainer`` on one device.

    python examples/lightning_strategy.py

The data are made: points on two spirals that wind around each other.
"""

from __future__ import annotations

import argparse
import json
import tempfile

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from penstock.interop.lightning import PenstockStrategy
from penstock.interop.spread import Spread


class Spirals(lightning.LightningModule):
    """Says on which of two spirals a point lies."""

    def __init__(self, width: int = 48, blocks: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(2, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, points):
        value = self.embed(points)
        for block in self.blocks:
            value = value + F.gelu(block(value))
        return self.head(value)

    def loss(self, outputs, targets):
        """Where a training step is split: called for each microbatch by the last stage."""
        return F.cross_entropy(outputs, targets)

    def training_step(self, batch, _):
        points, spiral = batch
        loss = self.loss(self(points), spiral)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        points, spiral = batch
        self.log("accuracy", (self(points).argmax(-1) == spiral).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def spirals(count: int = 512) -> TensorDataset:
    """Points of both spirals, a turn and a half long."""
    generator = torch.Generator().manual_seed(1)
    spiral = torch.randint(0, 2, (count,), generator=generator)
    angle = 9.0 * torch.rand(count, generator=generator) + 0.5
    turned = angle + torch.pi * spiral
    points = torch.stack([turned.cos(), turned.sin()], 1) * angle[:, None] / 9.0
    return TensorDataset(points, spiral)


def train(strategy, folder: str):
    """(a module that was trained with this strategy, its trainer)."""
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=20,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    module, data = Spirals(), spirals()
    loader = DataLoader(
        data, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(2)
    )
    trainer.fit(module, loader, DataLoader(data, batch_size=256))
    return module, trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", default=tempfile.gettempdir(), help="where checkpoints go")
    folder = parser.parse_args().output
    alone, _ = train("auto", folder)
    spread = Spread(stages=2, schedule="1f1b", microbatches=4)
    ours, trainer = train(PenstockStrategy(spread), folder)
    print(trainer.strategy.plan)
    told = {
        "accuracy": float(trainer.callback_metrics["accuracy"]),
        "largest difference": max(
            float((one - other).detach().abs().max())
            for one, other in zip(ours.parameters(), alone.parameters(), strict=True)
        ),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
