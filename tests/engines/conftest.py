"""The engines that plans are handed over to, each in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.install import python_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/engines/" in item.path.as_posix():
            item.add_marker(pytest.mark.engines)


JOBS = Path(__file__).parent / "jobs"
LIMIT_SECONDS = 540


class Engine:
    """An engine's environment."""

    def __init__(self, name: str) -> None:
        self.python = python_of(name)
        if not self.python.exists():
            pytest.skip(f"{name} is not installed in {self.python.parents[1]}; run make engines")

    def run(self, job: str, *arguments: str | Path, num_ranks: int = 0) -> str:
        """What a job prints; on several ranks, under torchrun."""
        launch = [self.python]
        if num_ranks:
            launch += ["-m", "torch.distributed.run", "--standalone"]
            launch += ["--nproc-per-node", str(num_ranks)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [*map(str, launch), str(JOBS / job), *map(str, arguments)],
            env={**environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def reports_in(folder: Path) -> list[dict]:
    """The reports of all ranks, in their order."""
    paths = sorted(folder.glob("report-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture
def torchtitan() -> Engine:
    return Engine("torchtitan")


@pytest.fixture
def megatron() -> Engine:
    return Engine("megatron")


@pytest.fixture
def automodel() -> Engine:
    return Engine("automodel")


@pytest.fixture
def deepspeed() -> Engine:
    return Engine("deepspeed")
