"""The compilers of a stage's passes by name, and what they need to be there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Literal, get_args

import torch

from penstock.base.errors import InputError
from penstock.base.values import one_of
from penstock.engine.device import captured_graphs

Backend = Literal["inductor", "aot_eager", "cudagraphs"]
"""By torch's names: Inductor, which makes fused kernels; operations as of eager mode in turn; the
same, captured on the accelerator."""

CHOICES = ("inductor", "aot_eager")
"""What callers may choose."""


def backend_of(compile: object) -> Backend | None:
    """The backend that an argument ``compile`` means; ``None`` for eager mode.

    Raises:
        InputError: it means none.
    """
    if compile is False:
        return None
    if compile is True:
        return "inductor"
    one_of("compile", compile, CHOICES)
    return next(name for name in get_args(Backend) if name == compile)


def replaying_on(devices: Iterable[torch.device]) -> Backend:
    """The backend with which passes are replayed on some devices.

    Raises:
        InputError: there is none for them.
    """
    kinds = sorted({device.type for device in devices})
    if len(kinds) == 1 and kinds[0] in captured_graphs.KINDS:
        return "cudagraphs"
    if kinds == ["cpu"]:
        return "inductor"
    raise InputError(
        f"replay=True replays passes on CPUs or on {', '.join(captured_graphs.KINDS)}, and the "
        f"ranks of this process compute on {' and '.join(kinds)}; leave it out"
    )


def check_compiler(backend: Backend, devices: Iterable[torch.device]) -> None:
    """Raise ``InputError`` if a backend lacks the compiler that it needs for some devices."""
    if backend != "inductor" or all(device.type != "cpu" for device in devices):
        return
    wanted = os.environ.get("CXX", "g++")
    if shutil.which(wanted) is None:
        raise InputError(
            f"compiled passes are C++ on a CPU, and there is no compiler {wanted!r} here; install "
            "g++, or set CXX to the one that there is; Pipeline(…, compile='aot_eager') needs none"
        )
