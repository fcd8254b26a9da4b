"""``python -m tests.engines.install``: environments of their own for the engines that plans are
handed over to, in the versions that ``CAPABILITIES`` says, under ``build/engines``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock.planning.handover.capabilities import CAPABILITIES
from tests.kit.paths import ROOT

ENGINES = ROOT / "build" / "engines"
TORCH = f"torch=={CAPABILITIES['torch'].version}"
ENGINES_BESIDE_TORCH = [engine for engine in CAPABILITIES if engine != "torch"]
BESIDE = {"torchtitan": ["triton"], "megatron": ["numpy"], "automodel": ["pyyaml"]}
"""Packages that an engine loads and does not ask for."""


def requirements(engine: str) -> list[str]:
    """The packages of an environment, pinned where a version decides."""
    able = CAPABILITIES[engine]
    return [TORCH, f"{able.package}=={able.version}", *BESIDE.get(engine, [])]


def install(engine: str) -> None:
    """Make an engine's environment; one that has all already is left as it is."""
    folder = ENGINES / engine
    wanted = "\n".join(requirements(engine))
    stamp = folder / "installed.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"installing {', '.join(requirements(engine))} into {folder} …", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", *requirements(engine)], check=True)
    stamp.write_text(wanted)


def python_of(engine: str) -> Path:
    """The interpreter of an engine's environment, whether it is there or not."""
    return ENGINES / engine / "bin" / "python"


def main() -> None:
    failed = []
    for engine in ENGINES_BESIDE_TORCH:
        try:
            install(engine)
        except (OSError, subprocess.CalledProcessError) as error:
            failed.append(engine)
            print(f"{engine} cannot be installed here: {error}", file=sys.stderr)
    if failed:
        print(f"tests of {', '.join(failed)} will be skipped", file=sys.stderr)


if __name__ == "__main__":
    main()
