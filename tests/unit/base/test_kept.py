"""Results that an object works out once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.base.kept import kept


@dataclass(frozen=True)
class Counting:
    factor: int

    @kept
    def times(self, number: int) -> list[int]:
        """Many of them."""
        return [number * self.factor]


def test_each_object_works_out_each_result_once():
    counting = Counting(2)
    assert counting.times(3) == [6] and counting.times(3) is counting.times(3)
    assert counting.times(4) == [8]
    assert replace(counting, factor=5).times(3) == [15]


def test_it_looks_like_the_method_that_it_is():
    assert (Counting.times.__name__, Counting.times.__doc__) == ("times", "Many of them.")
