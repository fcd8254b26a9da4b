"""The example runs unchanged as threads and as processes, with the same losses."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.kit.launch import ROOT, torchrun

SCRIPT = ROOT / "examples" / "train_lm.py"
SMALL = ("--steps", "10", "--microbatches", "4", "--width", "40", "--blocks", "3")


def losses(output: str) -> list[str]:
    return re.findall(r"step \d+: loss [\d.]+, held out [\d.]+", output)


def test_the_example_gives_the_same_losses_both_ways(tmp_path):
    picture = tmp_path / "last.svg"
    threads = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, "--draw", str(picture)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    processes = torchrun(SCRIPT, 2, *SMALL, reports=False)
    assert processes.returncode == 0, processes.output
    assert len(losses(threads.stdout)) == 2
    assert losses(processes.output) == losses(threads.stdout)
    first, last = (float(line.split()[3].strip(",")) for line in losses(threads.stdout))
    assert last < first
    assert picture.read_text().startswith("<svg")


def test_the_example_fits_on_a_screen():
    assert len(SCRIPT.read_text().splitlines()) <= 60
