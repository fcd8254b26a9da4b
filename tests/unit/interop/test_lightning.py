"""Lightning's Trainer with a pipeline as its strategy, beside the same Trainer on one device.

Lightning takes seconds to load, so the first test that asks for it does, and all that do are here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from penstock.base.errors import InputError, ModelError
from tests.docs.pages import run_page

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore:::lightning.*"),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
]


@pytest.fixture(scope="module")
def pl():
    """The library and the adapter, by their names, and a module to train."""
    import logging

    import lightning

    from penstock.interop import lightning as adapter
    from penstock.interop.spread import Spread

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Classifier(lightning.LightningModule):
        """Residual blocks, which are no chain; it keeps the loss of every step."""

        def __init__(self, dropout=0.0):
            super().__init__()
            self.embed = nn.Linear(6, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.drop = nn.Dropout(dropout)
            self.head = nn.Linear(8, 3)
            self.losses = []

        def forward(self, value):
            value = self.embed(value)
            for block in self.blocks:
                value = value + torch.tanh(self.drop(block(value)))
            return self.head(value)

        def loss(self, outputs, targets):
            return F.cross_entropy(outputs, targets)

        def training_step(self, batch, _):
            inputs, targets = batch
            loss = self.loss(self(inputs), targets)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, _):
            inputs, targets = batch
            outputs = self(inputs)
            self.log("val_loss", self.loss(outputs, targets))
            self.log("right", (outputs.argmax(-1) == targets).float().mean())

        def predict_step(self, batch, _):
            return self(batch[0])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return SimpleNamespace(
        lightning=lightning, adapter=adapter, Spread=Spread, Classifier=Classifier
    )


def batches():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 6, generator=generator)
    targets = torch.randint(0, 3, (30,), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=8)


def trainer_of(pl, strategy, folder, **given):
    settings = {
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "logger": pl.lightning.pytorch.loggers.CSVLogger(folder),
        **given,
    }
    return pl.lightning.Trainer(
        accelerator="cpu", strategy=strategy, default_root_dir=folder, **settings
    )


def strategy_of(pl, schedule="1f1b"):
    return pl.adapter.PenstockStrategy(pl.Spread(stages=2, schedule=schedule))


def module_of(pl, **options):
    torch.manual_seed(0)
    return pl.Classifier(**options)


def test_it_trains_validates_predicts_and_resumes_as_on_one_device(pl, tmp_path):
    ours, theirs = module_of(pl), module_of(pl)
    trainers = [
        trainer_of(pl, strategy, tmp_path / str(number))
        for number, strategy in enumerate((strategy_of(pl), "auto"))
    ]
    for trainer, module in zip(trainers, (ours, theirs), strict=True):
        trainer.fit(module, batches(), batches())
    assert len(ours.losses) == 8
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    given, wanted = ({**trainer.callback_metrics} for trainer in trainers)
    assert {"train_loss_epoch", "val_loss", "right"} <= given.keys()
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-6)
    logged = [Path(trainer.logger.experiment.metrics_file_path) for trainer in trainers]
    assert len({len(path.read_text().splitlines()) for path in logged}) == 1
    assert len(trainers[0].strategy.plan.stages) == 2
    assert trainers[0].strategy.pipeline.timeline.makespan > 0

    outputs = [torch.cat(trainer.predict(ours, batches())) for trainer in trainers]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)

    kept = trainers[0].checkpoint_callback.best_model_path
    for trainer, module in zip(trainers, (ours, theirs), strict=True):
        module.losses.clear()
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, batches(), ckpt_path=kept)
    assert len(ours.losses) == 4
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    trainers[0].strategy.teardown()


@pytest.mark.soak
def test_dropout_draws_alike_after_resuming(pl, tmp_path):
    first, losses = None, []
    for number in range(2):
        keeping = pl.lightning.pytorch.callbacks.ModelCheckpoint(save_top_k=-1)
        folder = tmp_path / str(number)
        trainer = trainer_of(pl, strategy_of(pl, "zb-h1"), folder, callbacks=[keeping])
        module = module_of(pl, dropout=0.3)
        trainer.fit(module, batches(), ckpt_path=first)
        losses.append(module.losses[-4:])
        first = sorted(Path(keeping.dirpath).glob("epoch=0-*"))[0] if first is None else first
        assert len(module.losses) == (8, 4)[number]
    assert losses[0] == losses[1]


def test_what_a_step_makes_of_outputs_other_than_the_loss_is_refused(pl, tmp_path):
    class Careless(pl.Classifier):
        def training_step(self, batch, _):
            return F.cross_entropy(self(batch[0]), batch[1])

    class Odd(pl.Classifier):
        def training_step(self, batch, _):
            return self.loss(batch[0], batch[1])

    class Lossless(pl.Classifier):
        loss = None

    cases = [
        (Careless, InputError, "cross_entropy was asked for outputs of a training step"),
        (Odd, InputError, r"self.loss must be given what self\(…\) returned.*given a Tensor"),
        (Lossless, ModelError, r"Lossless has no method loss\(outputs, targets\)"),
    ]
    for kind, error, message in cases:
        trainer = trainer_of(pl, strategy_of(pl), tmp_path, logger=False, max_steps=1)
        with pytest.raises(error, match=message):
            trainer.fit(kind(), batches())


def test_a_spread_is_asked_for(pl):
    with pytest.raises(InputError, match="spread"):
        pl.adapter.PenstockStrategy(2)


@pytest.mark.parametrize("asked", [{"devices": 2}, {"num_nodes": 2}])
def test_several_processes_are_refused(pl, tmp_path, asked):
    [(what, _)] = asked.items()
    with pytest.raises(InputError, match=f"the Trainer has {what}=2; leave {what} out"):
        trainer_of(pl, strategy_of(pl), tmp_path, **asked).fit(module_of(pl), batches())


def test_a_compiled_module_is_refused(pl, tmp_path):
    with pytest.raises(ModelError, match=r"compiled as a whole.*leave torch\.compile out"):
        trainer_of(pl, strategy_of(pl), tmp_path).fit(torch.compile(module_of(pl)), batches())


@pytest.mark.soak
def test_the_page_says_what_happens(pl, tmp_path, monkeypatch):
    """docs/lightning.md"""
    monkeypatch.chdir(tmp_path)
    run_page("docs/lightning.md", {})


@pytest.mark.soak
def test_the_example_trains_as_on_one_device(pl, tmp_path, monkeypatch, capsys):
    from examples import lightning_strategy

    monkeypatch.setattr(sys, "argv", ["lightning_strategy.py", "--output", str(tmp_path)])
    lightning_strategy.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["largest difference"] < 1e-4
    assert said["accuracy"] > 0.9
