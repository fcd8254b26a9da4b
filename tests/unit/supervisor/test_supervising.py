"""What ranks get from their supervisor, without any being forked."""

from __future__ import annotations

import gc
import os

from penstock.training.supervisor import supervising
from penstock.training.supervisor.job import Script, SupervisedJob
from penstock.training.supervisor.processes import Forked, Signals, door
from penstock.training.supervisor.supervising import Attempt


def test_only_the_keeper_of_the_store_has_its_door(monkeypatch):
    """Else the supervisor has it open for a moment when ranks are there already, and each rank
    until it has closed its own."""
    made, has_door, descriptors = door(), {}, []

    def started(name, _signals, _prepare):
        has_door[name] = made.fileno() >= 0
        descriptors.append(os.open(os.devnull, os.O_RDONLY))
        return Forked(name, 0, descriptors[-1])

    monkeypatch.setattr(supervising, "door", lambda: made)
    monkeypatch.setattr(Forked, "started", started)
    signals = Signals()
    try:
        ours = Attempt(SupervisedJob(Script(__file__, ()), 2), 0, signals)
        assert ours.start() is None
    finally:
        gc.unfreeze()
        signals.give_back()
        for descriptor in [*descriptors, ours._memory, ours._store]:
            os.close(descriptor)
    assert has_door == {"the keeper of the job's store": True, "rank 0": False, "rank 1": False}
