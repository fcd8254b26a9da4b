"""Between processes, each reads and writes the files of its own stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.training.checkpoint import pretrained
from tests.kit.examples import more
from tests.kit.launch import forked, torchrun
from tests.kit.pretrained import BATCH, built, keys_in, logits_of, pipeline_of, planned

JOB = Path(__file__).parent / "jobs" / "pretrained.py"

pytestmark = [
    pytest.mark.xdist_group("huggingface"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(transformers|accelerate).*"),
]


@pytest.mark.parametrize(("kind", "start"), [("llama", forked), more("gpt2", torchrun)])
def test_no_process_has_more_than_its_stages(kind, start, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "_MOST_ALONE_BYTES", 0)
    plan = planned(kind)
    plan.save(tmp_path / "plan.json")
    with pipeline_of(built(kind), plan) as pipeline:
        pipeline.save_pretrained(tmp_path / "first")
        expected = [float(pipeline.step(BATCH)) for _ in range(3)]
    folders = [str(tmp_path / name) for name in ("plan.json", "first", "second")]
    job = start(JOB, 2, kind, *folders)
    assert set(job.reports) == {0, 1}, job.output
    outputs = logits_of(tmp_path / "second", built(kind))
    model = built(kind)
    for report in job.reports.values():
        assert report["losses"] == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(torch.tensor(report["outputs"]), outputs, rtol=1e-4, atol=1e-6)
        assert "another save" in report["stale"]
        assert "gather_state_dict(rank=0)" in report["in parts"]
    first, second = (set(job.reports[rank]["has"]) for rank in (0, 1))
    every = {name for name, _ in model.named_parameters()}
    assert first | second == every
    tied = {"transformer.wte.weight"} if kind == "gpt2" else set()
    assert first & second == tied
    assert "cannot read the weights in" in job.reports[1]["refused"]
    assert "rank 1" in job.reports[0]["refused"]
    written = keys_in(tmp_path / "second")
    assert len(written) == (2 if kind == "gpt2" else 1)
    keys = [key for keys in written.values() for key in keys]
    assert len(keys) == len({*keys}) == len(every)
