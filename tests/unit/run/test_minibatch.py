"""What a minibatch is, and where it stands: values that read nothing around them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from penstock.engine.model.microbatches import Weighting
from penstock.engine.run.cutter import Cutter
from penstock.engine.run.digests import Call, CallDigest, Next
from penstock.engine.run.minibatch import Minibatch, StreamPosition, call_digest_of


def cutter():
    return Cutter(2, 1, Weighting("mean", None), False)


def test_equal_minibatches_are_equal_wherever_they_are_made():
    outside = Minibatch(3, ())
    with torch.autocast("cpu", torch.bfloat16):
        assert Minibatch(3, ()) == outside


def test_who_cuts_reads_the_callers_autocast_once():
    rows = torch.zeros(4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        training = cutter().to_train(rows, rows, step=0)
        evaluating = cutter().to_evaluate(rows, step=0)
    assert training.autocast == evaluating.autocast == {"cpu": torch.bfloat16}
    assert cutter().to_train(rows, rows, step=0).autocast == {}


def test_only_who_waits_lends_inputs_and_only_where_all_is_in_main_memory():
    rows = torch.zeros(4, 2)
    for lends, waits in itertools.product((True, False), repeat=2):
        cut = replace(cutter(), lends=lends).to_train(rows, rows, step=0, waits=waits)
        is_lent = lends and waits
        assert cut.lent == is_lent
        assert (cut.inputs[0].data_ptr() == rows.data_ptr()) == is_lent
        assert cut.targets[0].data_ptr() != rows.data_ptr()


def test_a_loop_says_whether_more_follow():
    rows = torch.zeros(4, 2)
    pairs = [*cutter().minibatches([(rows, rows)] * 3, first_step=5)]
    assert [minibatch.step for minibatch, _ in pairs] == [5, 6, 7]
    assert [position.more_follow for _, position in pairs] == [True, True, False]
    digests = [CallDigest.unpacked(call_digest_of(*pair)) for pair in pairs]
    assert {digest.call for digest in digests} == {Call.LOOP}
    assert [digest.behind for digest in digests] == [Next.MINIBATCH, Next.MINIBATCH, Next.NOTHING]


def test_a_loop_says_that_its_loader_has_raised():
    rows = torch.zeros(4, 2)

    def loader():
        yield rows, rows
        raise ValueError("boom")

    (pair,) = cutter().minibatches(loader(), first_step=0)
    assert CallDigest.unpacked(call_digest_of(*pair)).behind == Next.LOADER_ERROR


def test_what_ends_a_stream_has_nothing_to_compare():
    assert call_digest_of(Minibatch(0, ()), StreamPosition()) == b""
