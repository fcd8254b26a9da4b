"""The job of a supervisor: the script that its ranks run, and what each finds in its environment.

A forked process has an interpreter already, so what ``python script.py`` does is done here: the
first entry of ``sys.path``, ``sys.argv``, a module ``__main__`` that stays, and a traceback that
begins with the script.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
import uuid
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType, TracebackType

import torch

from penstock.base.errors import FileError, PeerError
from penstock.base.values import number, whole
from penstock.engine.run.drive.driver import failure_notice
from penstock.engine.run.logbook import VARIABLE, Logbook, ScriptFailure
from penstock.engine.transport import rendezvous

_INTERRUPTED = 130


@dataclass(frozen=True)
class Script:
    """The script that every rank runs.

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
            state = "a folder" if Path(self.name).is_dir() else "not there"
            raise FileError(f"the script {self.name} is {state}; give the path of a Python file")

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


def _new_name() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class SupervisedJob:
    """A script on some ranks of this host.

    Attributes:
        script: what every rank runs.
        num_ranks: how many processes there are.
        restarts: how often ranks may be started again.
        grace_seconds: how long ranks that are asked to end may take before they are killed.
        elastic: whether the job goes on with fewer ranks when a slot is lost for good.
        slots: the places on this host that ranks take, which are their ``LOCAL_RANK``; by default
            as many as there are ranks.
        name: of the job, which no other has.

    Raises:
        InputError: a number that makes no sense.
    """

    script: Script
    num_ranks: int
    restarts: int = 0
    grace_seconds: float = 5.0
    elastic: bool = False
    slots: tuple[int, ...] = ()
    name: str = field(default_factory=_new_name)

    def __post_init__(self) -> None:
        whole("the number of ranks", self.num_ranks, 1)
        whole("restarts", self.restarts, 0)
        number("grace_seconds", self.grace_seconds)
        if not self.slots:
            object.__setattr__(self, "slots", tuple(range(self.num_ranks)))

    def without(self, rank: int) -> SupervisedJob:
        """The same job on one rank fewer; nobody takes the slot of this one any more."""
        slots = self.slots[:rank] + self.slots[rank + 1 :]
        return replace(self, num_ranks=self.num_ranks - 1, slots=slots)

    def environment(
        self, rank: int, attempt: int, port: int, logbook: int, store: int
    ) -> dict[str, str]:
        """The environment of a rank: all that torchrun would tell it, where its logbook is, and
        where it meets the others.

        Args:
            rank: this process's.
            attempt: how often all ranks were started before.
            port: where torch's store of the attempt is.
            logbook: the descriptor of the pages of all ranks.
            store: that of the store that nobody else can open.
        """
        count = str(self.num_ranks)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(self.slots[rank]),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "ROLE_WORLD_SIZE": count,
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.restarts),
            "TORCHELASTIC_RUN_ID": self.name,
            # Ranks are clients of a store, and none of them keeps it.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
            VARIABLE: f"{os.getpid()}:{logbook}:{rank}",
            rendezvous.STORE_VARIABLE: rendezvous.told_to_rank(store, self.num_ranks),
        }
