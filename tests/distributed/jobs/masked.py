"""Every rank trains an encoder whose padding mask crosses the cuts and, beside it, all of it on one
device; then compares its own stage, and how leaves came to it.

``python masked.py TRANSPORT FOLDER`` in a job.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import penstock as pk
from tests.kit.helpers import make_plan
from tests.kit.masked import masked_batch, masked_encoder
from tests.kit.one_device import OneDevice
from tests.kit.training import DEADLINE_SECONDS, sgd


def differences(transport: str) -> list[str]:
    """What is not the same to the bit; nothing, one hopes."""
    ours, theirs = masked_encoder(), masked_encoder()
    one = OneDevice(theirs, 4, F.cross_entropy, sgd)
    found = []
    with pk.Pipeline(
        ours, make_plan(ours, dist.get_world_size(), 4), loss=F.cross_entropy, optimizer=sgd,
        transport=transport, deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        for step in range(3):
            batch = masked_batch(seed=step)
            if not torch.equal(pipeline.step(*batch), one.step(*batch)):
                found.append(f"loss of step {step}")
        whole = theirs.state_dict()
        own = pipeline.state_dict().items()
        found += [key for key, value in own if not torch.equal(value, whole[key])]
    for mine, other in zip(ours[:-1], theirs[:-1], strict=True):
        if mine.seen and set(mine.seen) != set(other.seen):
            found.append(f"leaves came as {set(mine.seen)}, not {set(other.seen)}")
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = Path(sys.argv[-1]) / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps(differences(sys.argv[1])))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
