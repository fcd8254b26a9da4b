"""Ordinary models train by the README's five lines, with nothing done to them first."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from examples import any_model

SOON = (
    *("GPT-2", "U-Net", "a dictionary with its loss"),
    *("mixture of experts", "graph net with scatter", "seq2seq, tied"),
)
"""Tried each time; the others take minutes together."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SOON else pytest.mark.soak)
        for name in any_model.CASES
    ],
)
def test_a_model_trains_as_on_one_device(name):
    layers, apart = any_model.compared(name)
    assert layers >= 2
    assert apart < 1e-4


def test_the_table_has_a_row_for_each_and_counts_what_failed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setitem(any_model.CASES, "refused", lambda: any_model.Case(None, None))
    assert any_model.main(["a dictionary with its loss", "refused"]) == 1
    told = capsys.readouterr().out
    assert "a dictionary with its loss" in told and "not an nn.Module" in told
