"""Which pieces a plan's ranks write: together all of the state, and nothing twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import penstock as pk
from penstock.core.cluster import SpareMachine
from penstock.training.checkpoint.contents import Contents
from penstock.training.checkpoint.folder import checkpoint_in
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.reducing import replicated
from tests.kit.training import DEADLINE_SECONDS, adamw

SERVED = {
    # (copies of each stage, parameter servers): the files of each stage
    ((1, 1), 0): ["stage-0", "stage-1"],
    ((1, 2), 0): ["stage-0", "stage-1"],
    ((1, 2), 1): ["stage-0", "stage-1.part-0", "stage-1.part-1"],
    ((2, 2), 2): [f"stage-{stage}.part-{part}" for stage in (0, 1) for part in (0, 1, 2)],
}


@pytest.mark.parametrize(("replicas", "num_servers"), SERVED)
def test_every_stage_is_written_once_and_by_whom_it_lies_with(replicas, num_servers, tmp_path):
    plan = replicated(make_mlp(), replicas)
    if num_servers:
        spares = [SpareMachine(name=f"spare{k}", bytes_per_second=1e9) for k in range(num_servers)]
        plan = plan.with_reducer("parameter-server", spares)
    with pk.Pipeline(
        model := make_mlp(), plan, loss=F.cross_entropy, optimizer=adamw, transport="threads",
        deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        pipeline.step(*make_batch(24))
        pipeline.save(tmp_path, background=False)
        weights = {key: value.clone() for key, value in model.state_dict().items()}
    checkpoint = checkpoint_in(tmp_path)
    names = [path.name for path in sorted(checkpoint.folder.glob("*.safetensors"))]
    assert names == [f"{name}.safetensors" for name in SERVED[replicas, num_servers]]
    contents = Contents(checkpoint)
    for key, value in weights.items():
        assert torch.equal(contents.tensor(key), value)
        kept = contents.tensor(f"optimizer/{key}/exp_avg")
        assert kept.shape == value.shape
        assert kept.any()
    # Weights are in the first piece of their stage alone; the others have rows of the optimizer's.
    own = [
        [name for name in piece.header.tensors if name in weights] for piece in checkpoint.pieces
    ]
    parts = [piece.header.part for piece in checkpoint.pieces]
    assert [bool(names) for names in own] == [part == 0 for part in parts]
