"""The script of a job, and how a forked process becomes the one that runs it.

The process has an interpreter already, so what ``python script.py`` does is done here: the first
entry of ``sys.path``, ``sys.argv``, a module ``__main__`` that stays, and a traceback that begins
with the script.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType, TracebackType

import torch

from penstock.base.errors import FileError, PeerError
from penstock.engine.run.drive.driver import failure_notice
from penstock.engine.run.logbook import Logbook, ScriptFailure

_INTERRUPTED = 130


@dataclass(frozen=True)
class Script:
    """What every rank runs.

    Attributes:
        name: a file, or the name of a module.
        arguments: what stands behind it in ``sys.argv``.
        is_module: whether it is a module, as after ``python -m``.

    Raises:
        FileError: there is no such file or module.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def __post_init__(self) -> None:
        if self.is_module:
            self._check_module()
        elif not Path(self.name).is_file():
            what = "a folder" if Path(self.name).is_dir() else "not there"
            raise FileError(f"the script {self.name} is {what}; give the path of a Python file")

    def _check_module(self) -> None:
        sys.path.insert(0, os.getcwd())
        try:
            there = importlib.util.find_spec(self.name) is not None
        except (ImportError, ValueError):
            there = False
        finally:
            sys.path.remove(os.getcwd())
        if not there:
            raise FileError(
                f"there is no module {self.name}; give the name that import would take, such as "
                "pkg.train, or leave -m out for a file"
            )

    def run(self, rank: int) -> None:
        """Be the process that runs the script; what it raises is printed as Python does, and noted
        for the supervisor.

        Args:
            rank: this process's.

        Raises:
            SystemExit: with the exit code of the script, always.
        """
        _draw_anew()
        if isinstance(sys.stdout, TextIOWrapper):
            # What a rank has printed is not lost when it is killed.
            sys.stdout.reconfigure(line_buffering=True)
        code = 0
        try:
            self._run()
        except SystemExit as leaving:
            if leaving.code is not None and not isinstance(leaving.code, int):
                _note(rank, leaving)
            raise
        except BaseException as error:
            _note(rank, error)
            error.__traceback__ = _without_own(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
            code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        sys.exit(code)

    def _run(self) -> None:
        first = os.getcwd() if self.is_module else str(Path(self.name).resolve().parent)
        # Instead of the folder of the command that forked this process.
        sys.path[0:1] = [] if sys.flags.safe_path else [first]
        sys.argv = [self.name, *self.arguments]
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        path = os.path.abspath(self.name)
        main = ModuleType("__main__")
        main.__dict__.update(
            __file__=path, __loader__=SourceFileLoader("__main__", path), __builtins__=builtins
        )
        sys.modules["__main__"] = main  # it stays: what the script leaves behind may look it up
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def _draw_anew() -> None:
    """Seed what a fresh interpreter would seed by chance: forks would all draw the same numbers, in
    each attempt anew. (Python's own generator is seeded by the fork.)"""
    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _note(rank: int, error: BaseException) -> None:
    Logbook.of_this_process().fail(
        ScriptFailure(failure_notice(rank, error), followed=_followed(error))
    )


def _followed(error: BaseException) -> bool:
    """Whether an error says, or was raised because of one that says, that another rank failed."""
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        if isinstance(chain, PeerError):
            return True
        seen.add(id(chain))
        chain = chain.__cause__ or chain.__context__
    return False


def _without_own(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback from where the script begins; if it did not begin, nothing of it."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback
