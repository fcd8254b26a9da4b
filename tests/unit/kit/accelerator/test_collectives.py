"""The library that carries tensors between emulated devices of two processes keeps its rules."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.kit.accelerator import building
from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "collectives.py"

pytestmark = pytest.mark.skipif(bool(building.why_not()), reason=building.why_not() or "")


@cache
def told():
    done = forked(JOB, 2)
    assert done.returncode == 0, done.output
    return done.reports


def test_what_is_sent_arrives():
    assert all("what_is_sent_arrives" not in own for own in told().values())


@pytest.mark.parametrize(
    ("case", "rank", "message"),
    [
        ("ranks_that_do_not_connect", 0, "deadlock: rank 0 .* waits for rank 1 to connect"),
        ("sends_that_meet", 0, "deadlock: both ranks post sends as number 1"),
        ("sends_that_meet", 1, "deadlock: both ranks post sends as number 1"),
        ("sizes_that_differ", 1, "receives 4 bytes, but its counterpart sends 8"),
        ("a_send_without_a_receive", 0, "deadlock: .* waits for rank 1, which posts nothing"),
        ("a_send_that_is_overwritten", 0, "race on emu:0: .* writes what was used by copy"),
        ("a_send_that_is_not_kept", 0, "tensor which died under copy"),
        ("a_receive_that_is_not_waited_for", 1, "reads what was used by aten::fill_"),
        ("a_receive_waited_for_on_another_stream", 1, "reads what was used by aten::fill_"),
    ],
)
def test_who_breaks_a_rule_is_told(case, rank, message):
    assert re.search(message, told()[rank].get(case, "nothing"))
