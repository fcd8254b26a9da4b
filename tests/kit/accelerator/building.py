"""Compiles the emulated devices when they are first used, and keeps what was compiled."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from unittest import mock

_SOURCES = Path(__file__).parent / "device"
_NAME = "penstock_emulated_devices"


def why_not() -> str | None:
    """Why the devices cannot be had on this machine; nothing if they can."""
    headers = Path(sysconfig.get_paths()["include"])
    if not sys.platform.startswith("linux"):
        return f"the emulated accelerator is built on Linux only, not on {sys.platform}"
    if shutil.which(_compiler()) is None:
        return f"the emulated accelerator needs a C++ compiler, and there is no {_compiler()}"
    if shutil.which("ninja", path=path()) is None:
        return "the emulated accelerator needs ninja: pip install ninja"
    if not (headers / "Python.h").exists():
        return f"the emulated accelerator needs Python's headers, and {headers} has none"
    return None


def path() -> str:
    """Where programs are looked for: also beside this Python, as pip installs them."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def load() -> ModuleType:
    """The compiled devices. They are compiled first where no earlier run has done so.

    Processes that want them at once wait for the one that compiles. It works in a folder of its own
    and publishes the library by renaming it: a killed one leaves a folder, which the next removes.
    """
    import fcntl  # of Unix alone

    library = _folder() / f"{_NAME}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with (library.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                return _compile(library)
    return _import(library)


def _import(library: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(_NAME, library)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _folder() -> Path:
    """Where the library is kept; another source, torch or Python has another folder."""
    import torch

    contents = [path.name.encode() + path.read_bytes() for path in sorted(_SOURCES.iterdir())]
    versions = f"{torch.__version__} {sys.version} {_compiler()}".encode()
    key = hashlib.sha256(b"\0".join([versions, *contents])).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock" / "emulated-devices" / key


def _compile(library: Path) -> ModuleType:
    from torch.utils import cpp_extension  # loads setuptools

    for abandoned in library.parent.glob("build-*"):
        shutil.rmtree(abandoned)
    with (
        tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder,
        mock.patch.dict(os.environ, PATH=path()),
    ):
        module = cpp_extension.load(
            _NAME,
            [str(_SOURCES / "all.cpp")],
            build_directory=folder,
            extra_cflags=["-O1"],
        )
        Path(folder, library.name).rename(library)  # what is loaded stays so under its new name
    return module
