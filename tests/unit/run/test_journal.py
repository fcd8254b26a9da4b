"""What a rank tells of itself: its last ops, and what it does now."""

from __future__ import annotations

import time

from penstock import Op
from penstock.engine.run.rank.interpreter import NUM_SHOWN, Journal


def ops(count):
    return [Op.parse(f"0F{k}") for k in range(count)]


def test_a_rank_that_has_done_nothing_says_so():
    assert Journal().text(2) == "rank 2: did nothing; idle"


def test_only_the_last_ops_are_told_in_their_order():
    done = ops(NUM_SHOWN + 3)
    journal = Journal([*done, Op.parse("0B0")])
    journal.starts.extend([0.0] * len(done))
    journal.ends.extend([1.0] * len(done))
    shown = " ".join(f"0F{k}" for k in range(3, NUM_SHOWN + 3))
    assert journal.text(0) == f"rank 0: did {shown}; idle"


def test_the_current_op_is_told_with_its_age_and_what_it_waits_for():
    receive = Op.parse("1RECV_F0")
    waiting = {receive: "rank 1, waiting at 1RECV_F0 for 0SEND_F0 of rank 0"}
    journal = Journal([receive, Op.parse("1F0")], waiting)
    assert journal.current is None
    journal.starts.append(time.perf_counter() - 2)
    assert journal.current == receive
    text = journal.text(1)
    assert text.startswith("rank 1: did nothing; at 1RECV_F0 for 2")
    assert text.endswith(" s (rank 1, waiting at 1RECV_F0 for 0SEND_F0 of rank 0)")
    journal.end()
    assert "waiting" not in journal.text(1)
