"""The store that ranks inherit: theirs alone, and of their job alone."""

from __future__ import annotations

import os
import stat

import pytest

from penstock.base.errors import RunError
from penstock.engine.transport.rendezvous import (
    STORE_VARIABLE,
    empty_store,
    private_store,
    told_to_rank,
)


@pytest.fixture
def descriptor(monkeypatch):
    descriptor = empty_store()
    monkeypatch.setenv(STORE_VARIABLE, told_to_rank(descriptor, 4))
    yield descriptor
    os.close(descriptor)


def test_whoever_opens_it_finds_what_others_have_written(descriptor):
    private_store(4).set("key", "value")
    assert private_store(4).get("key") == b"value"


def test_it_has_no_name_and_is_the_users_alone(descriptor):
    status = os.fstat(descriptor)
    assert status.st_nlink == 0
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert not os.get_inheritable(descriptor)


def test_other_jobs_have_none(descriptor, monkeypatch):
    assert private_store(3) is None  # another group of processes than the job's
    monkeypatch.setenv(STORE_VARIABLE, f"{os.getppid()}:{descriptor}:4")
    assert private_store(4) is None  # a process that the rank has started
    monkeypatch.delenv(STORE_VARIABLE)
    assert private_store(4) is None


def test_a_store_that_is_gone_is_told(monkeypatch):
    monkeypatch.setenv(STORE_VARIABLE, told_to_rank(99999, 4))
    with pytest.raises(RunError, match="the store of the job cannot be opened at /proc/self/fd/9"):
        private_store(4)
