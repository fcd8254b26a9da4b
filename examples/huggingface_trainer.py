"""A Hugging Face model trained by a Hugging Face ``Trainer`` through a pipeline, beside the same
``Trainer`` on one device.

    python examples/huggingface_trainer.py

The model is a small GPT-2 with fresh weights, the data are made: rows in which every token is the
one before plus a step that the row keeps to. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile

import torch

VOCABULARY, LENGTH = 48, 16


def build_model():
    """A GPT-2 of 40 000 parameters, without dropout, so that both runs are alike."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 3, "n_head": 4}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, **rates))


def rows(count: int = 256) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens that count up, each in steps of its own."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    steps = torch.randint(1, 5, (count, 1), generator=generator)
    tokens = (starts + steps * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(kind, folder: str, **named):
    """A trainer of this kind that has trained."""
    from transformers import TrainingArguments

    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        eval_strategy="epoch",
        logging_steps=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = rows()
    trainer = kind(
        model=build_model(), args=args, train_dataset=data, eval_dataset=data[:32], **named
    )
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", default=tempfile.gettempdir(), help="where checkpoints go")
    arguments = parser.parse_args()

    from transformers import Trainer

    from penstock.interop.huggingface import PenstockTrainer, Spread

    alone = train(Trainer, os.path.join(arguments.output, "one-device"))
    spread = Spread(stages=2, schedule="1f1b", microbatches=4)
    ours = train(PenstockTrainer, os.path.join(arguments.output, "pipeline"), spread=spread)
    print(ours.plan)
    told = {
        "losses": [entry["loss"] for entry in ours.state.log_history if "loss" in entry],
        "largest difference": max(
            float((one - other).detach().abs().max())
            for one, other in zip(ours.model.parameters(), alone.model.parameters(), strict=True)
        ),
    }
    print(json.dumps(told))
    ours.close()


if __name__ == "__main__":
    main()
