"""Every process is a tensor rank that has some of the positions and of the classes; it trains, and
reports what differs from one device.

``python sequences.py MODEL SIZES FOLDER`` in a job; ``SIZES`` are pipe × data × tensor.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import penstock as pk
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.one_device import same
from tests.kit.training import momentum
from tests.numerics.test_meshes import MICROBATCHES, mesh
from tests.numerics.test_sequence_and_vocabulary import MODELS, TOLERANCE, words

CHAIN = {
    "embedding.tokens": "row",
    "blocks.0": "sequence",
    "blocks.1": "sequence",
    "blocks.*.attention.queries_keys_values": "column/3",
    "blocks.*.attention.project": "row",
    "blocks.*.mlp.expand": "column",
    "blocks.*.mlp.project": "row",
    "head": "sequence",
    "head.logits": "vocabulary",
}
LLAMA = {
    "model.embed_tokens": "row",
    "model.rotary_emb": "sequence",
    "model.layers.0": "sequence",
    "model.layers.1": "sequence",
    "model.layers.*.self_attn.q_proj": "column",
    "model.layers.*.self_attn.k_proj": "column",
    "model.layers.*.self_attn.v_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "model.norm": "sequence",
    "lm_head": "vocabulary",
}
SPLITS = {"chain": CHAIN, "Llama": LLAMA, "Llama, tied": LLAMA}
BATCHES = 2


def differences(name, sizes):
    build, _, loss = MODELS[name]
    model = build()
    theirs = copy.deepcopy(model)
    plan = mesh(model, "1f1b", *(int(size) for size in sizes.split("x")), splits=SPLITS[name])
    with pk.Pipeline(
        model, plan, loss=loss, optimizer=momentum, seed=3, deadline_seconds=300
    ) as pipeline:
        losses = [pipeline.step(*words(seed, rows=8)) for seed in range(BATCHES)]
        outputs = pipeline.evaluate(words(5, rows=8)[0])
        state = pipeline.gather_state_dict()
    if dist.get_rank():
        return  # rank 0 knows what all have
    one = SingleDevice(theirs, MICROBATCHES, loss, momentum, seed=3)
    expected = torch.stack([one.step(*words(seed, rows=8)) for seed in range(BATCHES)])
    if not same(torch.stack(losses), expected, TOLERANCE):
        yield f"losses {losses} {expected}"
    whole = theirs.eval()(words(5, rows=8)[0])
    if not same(getattr(outputs, "logits", outputs), getattr(whole, "logits", whole), TOLERANCE):
        yield "outputs"
    for key, value in theirs.state_dict().items():
        if not same(state[key], value, TOLERANCE):
            yield key


if __name__ == "__main__":
    _, name, sizes, folder = sys.argv
    dist.init_process_group("gloo")
    found = [*differences(name, sizes)]
    report = Path(folder) / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps(found))
    dist.destroy_process_group()
