"""The example runs unchanged as threads and as processes, with the same losses; that of accelerate,
whose ranks are threads, says so where it is one of several processes."""

from __future__ import annotations

import re
import runpy
import sys

from tests.kit.launch import forked, torchrun
from tests.kit.paths import ROOT

SCRIPT = ROOT / "examples" / "train_lm.py"
SMALL = ("--steps", "10", "--microbatches", "4", "--width", "40", "--blocks", "3")


def losses(output: str) -> list[str]:
    return re.findall(r"step \d+: loss [\d.]+, held out [\d.]+", output)


def test_the_example_gives_the_same_losses_both_ways(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "last.svg"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SMALL, "--draw", str(picture)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    threads = losses(capsys.readouterr().out)
    processes = torchrun(SCRIPT, 2, *SMALL, reports=False)
    assert processes.returncode == 0, processes.output
    assert len(threads) == 2
    assert losses(processes.output) == threads
    first, last = (float(line.split()[3].strip(",")) for line in threads)
    assert last < first
    assert picture.read_text().startswith("<svg")


def test_the_example_fits_on_a_screen():
    assert len(SCRIPT.read_text().splitlines()) <= 60


def test_the_loop_of_accelerate_is_refused_as_one_of_several_processes():
    processes = forked(ROOT / "examples" / "accelerate_loop.py", 2, reports=False)
    assert processes.returncode == 1
    assert (
        "prepare has its ranks as threads of one process, and this is one of 2; start it with "
        "plain python, or train with penstock.Pipeline under torchrun"
    ) in processes.output
    assert "largest difference" not in processes.output
