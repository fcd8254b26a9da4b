"""Loops of transformers and accelerate through a pipeline, beside the same loops on one device.

Both libraries take seconds to load, so they are loaded by the first test that asks for them, and
all tests that do are in this file.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from examples import accelerate_loop, huggingface_trainer
from penstock.base.errors import InputError
from tests.docs.pages import run_page

pytestmark = [
    pytest.mark.xdist_group("huggingface"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(transformers|accelerate).*"),
]

MICROBATCHES = 4
LENGTH = 10


@pytest.fixture(scope="module")
def hf():
    """The libraries and the adapter, by their names."""
    import accelerate
    import transformers

    from penstock.interop import huggingface

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return SimpleNamespace(adapter=huggingface, transformers=transformers, accelerate=accelerate)


@pytest.fixture(autouse=True)
def own_state_of_accelerate(hf):
    """It keeps for the whole process what the first trainer has asked for, such as bf16."""
    yield
    hf.accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def language_model(hf, dropout=0.0):
    """A GPT-2 whose embedding and head share their weight."""
    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = hf.transformers.GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0)
    return hf.transformers.GPT2LMHeadModel(config)


def classifier(hf):
    torch.manual_seed(0)
    config = hf.transformers.BertConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return hf.transformers.BertForSequenceClassification(config)


def texts(count=22):
    """Rows of tokens, of whose labels some do not count; all of one row's do not."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(count):
        tokens = torch.randint(0, 40, (LENGTH,), generator=generator)
        hidden = torch.rand(LENGTH, generator=generator) < (1.0 if index == 3 else 0.2)
        rows.append({"input_ids": tokens, "labels": tokens.masked_fill(hidden, -100)})
    return rows


def kinds(count=22):
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(0, 40, (LENGTH,), generator=generator),
            "labels": torch.randint(0, 3, (), generator=generator),
        }
        for _ in range(count)
    ]


def trainer_of(hf, kind, model, folder, rows, *, spread=None, arguments=None, **given):
    settings = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 5,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_steps": 4,
        "eval_strategy": "epoch",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **(arguments or {}),
    }
    named = {} if spread is None else {"spread": spread}
    return kind(
        model=model,
        args=hf.transformers.TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=rows,
        eval_dataset=rows[:7],
        **named,
        **given,
    )


def told(trainer, *names):
    """What a trainer has logged under these names."""
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


def assert_alike(ours, theirs):
    """Losses, norms, rates and weights are equal up to the rounding of float32."""
    names = "loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"
    assert len(told(ours, "loss")) == ours.state.max_steps > 3
    assert told(ours, *names) == pytest.approx(told(theirs, *names), rel=2e-5, abs=1e-7)
    for own, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=2e-5)


def trained_by_both(hf, tmp_path, make_model, rows, *, trainer=None, **given):
    """(through a pipeline, on one device), trained alike."""
    trainer = trainer or hf.transformers.Trainer
    ours_of = type("Ours", (hf.adapter.PenstockTrainer, trainer), {})
    spread = hf.adapter.Spread(microbatches=MICROBATCHES, stages=2, schedule="1f1b")
    theirs = trainer_of(hf, trainer, make_model(hf), tmp_path / "theirs", rows, **given)
    ours = trainer_of(hf, ours_of, make_model(hf), tmp_path / "ours", rows, spread=spread, **given)
    theirs.train()
    ours.train()
    return ours, theirs


def test_it_trains_evaluates_saves_and_resumes_as_on_one_device(hf, tmp_path):
    rows = texts()
    ours, theirs = trained_by_both(hf, tmp_path, language_model, rows)
    assert_alike(ours, theirs)
    given, wanted = ours.predict(rows[:7]), theirs.predict(rows[:7])
    assert given.metrics["test_loss"] == pytest.approx(wanted.metrics["test_loss"], rel=2e-5)
    torch.testing.assert_close(
        torch.tensor(given.predictions), torch.tensor(wanted.predictions), rtol=1e-4, atol=2e-5
    )
    assert len(ours.plan.stages) == 2
    assert len(ours.pipeline.timeline.spans) > 4 * MICROBATCHES

    losses, weights = told(ours, "loss", "grad_norm"), [*map(torch.clone, ours.model.parameters())]
    ours.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    assert told(ours, "loss", "grad_norm") == losses
    assert all(map(torch.equal, weights, ours.model.parameters()))
    ours.close()


@pytest.mark.soak  # each loads and traces another model
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("make_model", [classifier, language_model])
def test_models_whose_loss_is_a_mean_are_trained_as_trainer_does(
    hf, tmp_path, make_model, accumulated
):
    rows = kinds() if make_model is classifier else texts()
    arguments = {"gradient_accumulation_steps": accumulated, "max_grad_norm": 0.0}
    ours, theirs = trained_by_both(hf, tmp_path, make_model, rows, arguments=arguments)
    assert_alike(ours, theirs)
    ours.close()


@pytest.mark.soak
def test_label_smoothing_a_loss_function_and_a_subclass_are_honoured(hf, tmp_path):
    def summed(outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        wanted = labels[:, 1:].flatten()
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = torch.nn.functional.cross_entropy(logits, wanted, reduction=reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    class Tripled(hf.transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = 3 * summed(outputs, labels, num_items_in_batch)
            return (loss, outputs) if return_outputs else loss

    cases = [
        {"arguments": {"label_smoothing_factor": 0.1}},
        {"compute_loss_func": summed},
        {"trainer": Tripled},
    ]
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        ours, theirs = trained_by_both(hf, folder, language_model, texts(), **case)
        assert_alike(ours, theirs)
        ours.close()


@pytest.mark.soak
def test_dropout_draws_alike_after_resuming(hf, tmp_path):
    spread = hf.adapter.Spread(microbatches=MICROBATCHES, stages=2, schedule="1f1b")
    losses = []
    for checkpoint in (None, "checkpoint-4"):
        model = language_model(hf, dropout=0.2)
        kind = hf.adapter.PenstockTrainer
        trainer = trainer_of(hf, kind, model, tmp_path, texts(), spread=spread)
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / checkpoint))
        losses.append(told(trainer, "loss", "grad_norm"))
        trainer.close()
    assert losses[0] == losses[1]


@pytest.mark.soak
def test_rows_of_other_lengths_bf16_and_inputs_without_labels(hf, tmp_path):
    rows = texts()
    for row, length in zip(rows, [10, 7] * 11, strict=True):
        row.update({name: value[:length] for name, value in row.items()})

    def collator(picked):
        longest = max(len(row["input_ids"]) for row in picked)
        padded = {"input_ids": 0, "labels": -100}
        return {
            name: torch.stack(
                [
                    torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=value)
                    for row in picked
                ]
            )
            for name, value in padded.items()
            if name in picked[0]
        }

    for bf16 in (False, True):
        ours, theirs = trained_by_both(
            hf,
            tmp_path / str(bf16),
            language_model,
            rows,
            data_collator=collator,
            arguments={"bf16": bf16},
        )
        if bf16:
            assert told(ours, "loss") == pytest.approx(told(theirs, "loss"), rel=2e-2)
        else:
            assert_alike(ours, theirs)
            unlabelled = [{"input_ids": row["input_ids"]} for row in rows[:4]]
            given, wanted = (one.predict(unlabelled).predictions for one in (ours, theirs))
            torch.testing.assert_close(
                torch.tensor(given), torch.tensor(wanted), rtol=1e-4, atol=2e-5
            )
        ours.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fp16_full_eval": True}, "fp16_full_eval of TrainingArguments; use bf16=True"),
        ({"torch_compile": True}, "torch_compile of TrainingArguments; compile the model's layers"),
        ({"gradient_checkpointing": True}, "recomputes, as plan.recomputing"),
        ({"optim": "adalomo"}, "optim='adalomo' updates weights while it goes backward"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_what_a_pipeline_cannot_honour_is_refused(hf, tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        trainer_of(
            hf,
            hf.adapter.PenstockTrainer,
            None,
            tmp_path,
            texts(2),
            arguments=arguments,
        )


def test_one_of_several_processes_is_refused(hf, tmp_path, monkeypatch):
    arguments = hf.transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"PenstockTrainer has its ranks as threads.*one of 2"):
        hf.adapter.PenstockTrainer(language_model(hf), arguments)


def losses_of_a_loop(hf, model, *, spread=None):
    """A loop as accelerate's own examples have it."""
    accelerator = hf.accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # Adam makes much of the least rounding
    loader = DataLoader(texts(16), batch_size=4)
    losses = []
    if spread is None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        model = hf.adapter.prepare(model, spread=spread)
        optimizer, loader = accelerator.prepare(optimizer, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(outputs.loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(model(**batch).loss.item())
    return model, losses


@pytest.mark.soak
def test_a_loop_of_accelerate_is_the_same_with_a_prepared_model(hf):
    spread = hf.adapter.Spread(microbatches=MICROBATCHES, stages=2, schedule="zb-h1")
    ours, losses = losses_of_a_loop(hf, language_model(hf), spread=spread)
    theirs, wanted = losses_of_a_loop(hf, language_model(hf))
    assert losses == pytest.approx(wanted, rel=2e-5)
    for own, other in zip(ours.module.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=2e-5)
    ours.train()
    with pytest.raises(InputError, match="use nothing but the loss"):
        _ = ours(**next(iter(DataLoader(texts(4), batch_size=4)))).logits
    ours.close()


def test_an_optimizer_of_another_model_is_refused(hf):
    optimizer = torch.optim.SGD(language_model(hf).parameters(), lr=0.1)
    with pytest.raises(InputError, match="SGD has parameters that are not the model's"):
        hf.adapter.prepare(language_model(hf), optimizer)


@pytest.mark.soak  # three models are traced
def test_the_page_says_what_happens(hf, tmp_path, monkeypatch):
    """docs/huggingface.md"""
    monkeypatch.chdir(tmp_path)
    run_page("docs/huggingface.md", {})


@pytest.mark.soak
def test_the_example_trains_as_on_one_device(hf, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["huggingface_trainer.py", "--output", str(tmp_path)])
    huggingface_trainer.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["largest difference"] < 1e-3  # Adam makes much of the least rounding
    assert said["losses"][-1] < said["losses"][0]


def test_the_loop_of_accelerate_in_the_examples_gives_the_losses_of_one_device(capsys):
    accelerate_loop.main()
    told = json.loads(capsys.readouterr().out)
    assert told["largest difference"] < 1e-4
    assert told["losses"][-1] < told["losses"][0]
