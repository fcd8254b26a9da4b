"""The recipe for two hosts, by torchrun and Slurm, on two network namespaces with two processes."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from benchmarks.network import shaped_network
from benchmarks.network.shaped_network import ShapedNetwork
from tests.kit.launch import ENVIRONMENT
from tests.kit.paths import ROOT

SCRIPT = ROOT / "examples" / "two_hosts.py"
LIMIT_SECONDS = 380
FIRST, SECOND = "10.77.0.1", "10.77.0.2"

TORCHRUN = f'exec {sys.executable} -m torch.distributed.run "$@"'
SCONTROL = f"""
test "$*" = "show hostnames $SLURM_JOB_NODELIST" && echo {FIRST} && echo {SECOND}
"""
SRUN = """
while [[ $1 == --* ]]; do shift; done
node=0 code=0 pids=()
for host in $HOSTS; do
    SLURM_NODEID=$node ip netns exec "$host" "$@" & pids+=($!)
    node=$((node + 1))
done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
"""As Slurm does it: a command once on each host, which learns from a variable which it is."""


def on_two_hosts(network, tmp_path, script, *arguments):
    """Run a shell script as Slurm's first host would, with programs of that name in its path."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in (("torchrun", TORCHRUN), ("scontrol", SCONTROL), ("srun", SRUN)):
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_NNODES": "2",
        "HOSTS": " ".join(network.hosts),
        "PER_HOST": "2",
        "GLOO_SOCKET_IFNAME": "wire",
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    job = subprocess.Popen(
        ["bash", *script, *arguments],
        cwd=ROOT, env=ENVIRONMENT | slurm, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        return job.communicate(timeout=LIMIT_SECONDS)[0], job.returncode
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def losses(output):
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]


@pytest.fixture
def of_threads(monkeypatch, capsys):
    """What the same script prints in one process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert "loaded 1024 of 1024 rows" in printed
    return losses(printed)


reason = shaped_network.missing()

BY_HAND = """srun bash -c '
torchrun --nnodes 2 --node-rank $SLURM_NODEID --nproc-per-node 2 --master-addr 10.77.0.1 \
    --master-port 29500 examples/two_hosts.py "$@"' by-hand "$@"
"""


@pytest.mark.skipif(reason is not None, reason=str(reason))
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(["-c", BY_HAND, "by-hand"], id="torchrun", marks=pytest.mark.soak),
        pytest.param([str(ROOT / "examples" / "two_hosts.sbatch")], id="slurm"),  # torchrun, too
    ],
)
def test_two_hosts_train_as_one_process_and_load_their_own_rows(of_threads, script, tmp_path):
    with ShapedNetwork(2, 200) as network:
        output, code = on_two_hosts(network, tmp_path, script, "--save", str(tmp_path / "runs"))
    assert code == 0, output
    assert losses(output) == pytest.approx(of_threads, rel=1e-4)
    assert of_threads[-1] < of_threads[0]
    # Each stage has two replicas, and every replica takes every other microbatch.
    assert re.findall(r"loaded (\d+) of 1024 rows", output) == ["512"] * 4
    assert list((tmp_path / "runs").glob("step-*/stage-1.safetensors"))
