"""A loop of ``accelerate`` through a pipeline, beside the same loop on one device.

    python -m examples.accelerate_loop

Two lines of the loop differ: the import, and who prepares the model. The model and its data are
those of ``huggingface_trainer``. Ranks are threads of this process, so that ``torchrun`` and
``accelerate launch`` with several processes are refused.
"""

from __future__ import annotations

import json

import torch

from examples.huggingface_trainer import build_model, rows


def losses(spread=None) -> list[float]:
    """Those of an epoch: on one device, or as a ``Spread`` says."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from penstock.interop.huggingface import prepare

    accelerator, model = Accelerator(cpu=True), build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows(64), batch_size=16)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    model = accelerator.prepare(model) if spread is None else prepare(model, spread=spread)
    model.train()
    values = []
    for batch in loader:
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        values.append(outputs.loss.item())
    return values


def main() -> None:
    from penstock.interop.huggingface import Spread

    ours = losses(Spread(stages=2, schedule="1f1b", microbatches=4))
    alone = losses()
    apart = max(abs(mine - theirs) for mine, theirs in zip(ours, alone, strict=True))
    print(json.dumps({"losses": ours, "largest difference": apart}))


if __name__ == "__main__":
    main()
