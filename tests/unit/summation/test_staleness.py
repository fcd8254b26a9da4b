"""No order of arrival makes a gradient later than it may be, or loses one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.summation.staleness import Answer, Contribution, StaleClock, StaleStream


def run(num_workers, most_stale, num_minibatches, choose, *, known):
    """The clock of a stream in which ``choose`` says which of the free workers hands in next; the
    end is ``known`` before the last minibatch, or only behind it."""
    clock = StaleClock(num_workers, most_stale)
    given_by, has_weights = [0] * num_workers, [True] * num_workers
    version, read = 0, {}

    def follow(decided):
        nonlocal version
        for one in decided:
            if isinstance(one, Answer):
                assert one.version == version
                has_weights[one.to.worker] = True
                read[one.to._replace(minibatch=one.to.minibatch + 1)] = version
            else:
                version += 1

    while not clock.is_over:
        if known and clock.num_updates == num_minibatches - 1:
            follow(clock.ends_with(num_minibatches - 1))
        free = [
            worker
            for worker in range(num_workers)
            if has_weights[worker] and given_by[worker] < num_minibatches
        ]
        if not free:  # all have handed in all: whoever leads leaves the loop only now
            assert min(given_by) == num_minibatches
            assert all(has_weights)
            follow(clock.ends_with(num_minibatches - 1))
            break
        worker = choose(free)
        assert max(given_by) - min(given_by) <= most_stale + 1
        assert clock.next_of(worker) == Contribution(given_by[worker], worker)
        given_by[worker] += 1
        has_weights[worker] = False
        follow(clock.arrive(worker))
    assert clock.is_over
    assert read == clock.stream.reads
    return clock.stream


@given(data=st.data(), workers=st.integers(1, 4), stale=st.integers(0, 3), count=st.integers(1, 6))
def test_every_gradient_is_applied_once_and_never_too_late(data, workers, stale, count):
    known = data.draw(st.booleans())
    stream = run(workers, stale, count, lambda free: data.draw(st.sampled_from(free)), known=known)
    applied = [contribution for own in stream.updates for contribution in own]
    assert sorted(applied) == [Contribution(k, w) for k in range(count) for w in range(workers)]
    assert all(list(own) == sorted(own) and own for own in stream.updates)
    assert len(stream.updates) - count in ({0} if known else {0, 1})
    assert all(0 <= delay <= stale for delay in stream.delays.values())
    if not stale:
        assert stream.updates == [
            tuple(Contribution(k, w) for w in range(workers)) for k in range(count)
        ]
    assert StaleStream.unpacked(stream.packed()) == stream


def test_who_is_fast_goes_on_and_who_is_slow_is_waited_for_at_the_bound():
    clock = StaleClock(2, 1)
    fast, slow = 0, 1
    first = Contribution(0, fast)
    assert clock.arrive(fast) == [(first,), Answer(first, 1)]
    assert clock.arrive(fast) == []  # update 1 must have all of minibatch 0
    late, ahead = Contribution(0, slow), Contribution(1, fast)
    assert clock.arrive(slow) == [(late, ahead), Answer(ahead, 2), Answer(late, 2)]
    assert clock.stream.delays == {first: 0, late: 1, ahead: 0}
