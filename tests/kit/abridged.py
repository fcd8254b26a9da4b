"""What a timeline with both ends of a step must have in common with the whole one."""

from __future__ import annotations

import pytest


def assert_same_numbers(ends, whole):
    """What is left out counts in the numbers all the same."""
    assert ends.makespan == pytest.approx(whole.makespan, rel=1e-9)
    assert ends.bubble == pytest.approx(whole.bubble, abs=1e-9)
    assert ends.stage_bubble == pytest.approx(whole.stage_bubble, abs=1e-9)
    assert ends.peak_activations == whole.peak_activations
