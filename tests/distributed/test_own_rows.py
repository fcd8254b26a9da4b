"""Processes that load only rows that they compute with train as if they had loaded all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.base.errors import InputError
from tests.distributed.jobs.own_rows import Noted, loader_of
from tests.kit.helpers import make_mlp
from tests.kit.launch import forked
from tests.kit.training import pipeline_of

JOB = Path(__file__).parent / "jobs" / "own_rows.py"


def batches():
    """The rows of each minibatch, in order."""
    noted = Noted()
    sizes = [len(inputs) for inputs, _ in loader_of(noted)]
    return [batch.tolist() for batch in torch.tensor(noted.loaded).split(sizes)]


def rows_of(batch, microbatches):
    parts = torch.tensor(batch).tensor_split(4)
    return [row for number in microbatches for row in parts[number].tolist()]


def test_each_rank_loads_its_own_rows_and_losses_stay():
    job = forked(JOB, 4)
    assert set(job.reports) == {0, 1, 2, 3}, job.output
    for rank, own in enumerate(([0, 2], [1, 3], [], [0, 1, 2, 3])):
        report = job.reports[rank]
        assert report["losses"] == report["in workers"] == report["expected"]
        # The stage between loads one row, which stands for all.
        expected = [rows_of(batch, own) or batch[:1] for batch in batches()]
        assert report["loaded"] == [row for rows in expected for row in rows]
        assert "compare_data=False" in report["compared"]
        assert "weight=… counts the targets of all rows" in report["weighed"]


def test_one_process_loads_all_rows():
    noted = Noted()
    with pipeline_of(make_mlp(0.0)) as pipeline:
        own = pipeline.own_rows(noted)
        assert len(own) == len(noted)
        assert len([*loader_of(own)]) == 3
        assert sorted(noted.loaded) == [*range(len(noted))]
        assert torch.equal(own[3][0], noted.inputs[3])
        with pytest.raises(InputError, match="whose rows have numbers"):
            pipeline.own_rows(iter(noted))
