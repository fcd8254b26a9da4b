"""Which line of whose code an error is said to come from."""

from __future__ import annotations

import torch
from torch import nn

from penstock.engine.tracing.lines import lines_of


def shortened(value):
    return value[:, :3]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value):
        return self.linear(shortened(value))


def test_the_line_is_the_models_not_torchs():
    try:
        Model()(torch.randn(2, 6))
    except RuntimeError as error:
        (line,) = lines_of(error)
    assert str(line).endswith("in forward, `return self.linear(shortened(value))`")
    assert line.part == "self.linear(shortened(value))"
    assert line.file == __file__


def test_a_library_of_models_is_named_with_who_called_it(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "somebodys_models.py").write_text("def run(value):\n    return value @ value.T.T\n")
    monkeypatch.syspath_prepend(str(folder))
    import somebodys_models

    try:
        somebodys_models.run(torch.randn(2, 6))
    except RuntimeError as error:
        own, inner = lines_of(error)
    assert own.text == "somebodys_models.run(torch.randn(2, 6))"
    assert str(inner) == "somebodys_models.py:2, in run, `return value @ value.T.T`"


def test_where_no_model_runs_there_is_no_line():
    assert lines_of(ValueError("never raised")) == []
