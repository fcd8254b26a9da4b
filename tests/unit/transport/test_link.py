"""The ring: entries in order, none lost or overwritten, and nobody asleep while there is one."""

from __future__ import annotations

import mmap
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.transport import link
from penstock.engine.transport.link import HAS_RINGS, RING_BYTES, Lookout, RingReader, RingWriter

pytestmark = pytest.mark.skipif(not HAS_RINGS, reason="stores are seen in order on x86-64 only")

NUM_ENTRIES = 1024


def both_ends():
    memory = mmap.mmap(-1, RING_BYTES)
    return RingWriter(memory), RingReader(memory)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=20))
def test_entries_come_once_in_order_and_none_is_overwritten(turns):
    """Turns of writing and reading, of as many entries as there is room for."""
    writer, reader = both_ends()
    written = read = 0
    for writes, count in turns:
        for _ in range(count):
            if writes:
                accepted = writer.put(written, -written, 2**62 - 1 - written, 7)
                assert accepted == (written - read < NUM_ENTRIES)
                written += accepted
            else:
                assert reader.has_news() == (read < written)
                if read < written:
                    assert reader.next() == (read, -read, 2**62 - 1 - read, 7)
                    read += 1
                else:
                    assert reader.next() is None


def test_a_reader_that_sleeps_is_woken_for_every_entry_it_has_not_seen():
    """Each side at its own pace; a wake-up that was missed would stop the reader for good."""
    writer, reader = both_ends()
    bell = threading.Semaphore(0)
    num_entries, seen = 50_000, []

    def read():
        while len(seen) < num_entries:
            if reader.has_news():
                _, _, number, _ = reader.next()
                seen.append(number)
                continue
            reader.fall_asleep()
            if not reader.has_news() and not bell.acquire(timeout=300):
                return
            reader.wake()

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(num_entries):
        while not writer.put(0, 0, number, 0):
            bell.release()
        if writer.must_wake():
            bell.release()
    thread.join()
    assert seen == list(range(num_entries))


def test_who_has_learned_not_to_look_looks_again_when_waits_become_short(monkeypatch):
    now = 0.0

    def clock():
        nonlocal now
        now += 1e-6
        return now

    monkeypatch.setattr(link.time, "perf_counter", clock)
    lookout = Lookout(num_ranks=2)
    monkeypatch.setattr(lookout, "_has_cores", lambda: True)
    lookout.rings = [both_ends()[1]]

    def looked_for(sleeps):
        """How long it looks, before it sleeps for a while."""
        nonlocal now
        began = now
        assert not lookout.look()
        took = now - began
        with lookout.asleep():
            now += sleeps
        return took

    first = looked_for(sleeps=1.0)
    for _ in range(10):
        shortest = looked_for(sleeps=1.0)
    assert shortest < first / 10
    looked_for(sleeps=first / 4)
    assert looked_for(sleeps=1.0) > first / 4
