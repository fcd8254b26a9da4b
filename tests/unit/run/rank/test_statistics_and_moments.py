"""A worker moves running statistics, and waits for what its caller has asked of devices."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from penstock.engine.run.minibatch import Minibatch
from penstock.engine.run.rank import worker as worker_room
from penstock.engine.run.rank.worker import moments_of
from tests.unit.run.rank.test_worker import Notebook, segment, worker_of


def test_a_minibatch_moves_running_statistics_once_by_all_its_rows():
    # In double precision, in which the order of sums is below the tolerance.
    torch.manual_seed(0)
    rows = torch.randn(6, 3, dtype=torch.float64)
    model = nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64))
    whole = nn.BatchNorm1d(3, dtype=torch.float64)
    whole(rows)

    worker = worker_of(0, [0], 1, Notebook(), model, batch_norm="minibatch")
    targets = [torch.zeros(3, 3, dtype=torch.float64)] * 2
    worker.run(segment("0F0,0F1,0B0,0B1\n"), Minibatch(0, [*rows.split(3)], targets, [0.5, 0.5]))
    torch.testing.assert_close(model[0].running_mean, whole.running_mean)
    torch.testing.assert_close(model[0].running_var, whole.running_var)
    assert model[0].num_batches_tracked == 1


def test_a_caller_is_waited_for_on_the_devices_of_ranks_and_of_the_minibatch(monkeypatch):
    asked = []
    monkeypatch.setattr(worker_room, "moments_of_caller", lambda devices: asked.append({*devices}))
    elsewhere = SimpleNamespace(queue=SimpleNamespace(device=torch.device("meta")))
    moments_of(Minibatch(0, [torch.ones(1)], [torch.ones(1)], [1.0]), [elsewhere])
    assert asked == [{torch.device("meta"), torch.device("cpu")}]
