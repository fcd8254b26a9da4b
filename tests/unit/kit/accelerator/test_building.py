"""The devices are compiled once, by one process, and where they cannot be, somebody says why."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from tests.kit.accelerator import building
from tests.kit.launch import ENVIRONMENT
from tests.kit.paths import ROOT


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def compiled(monkeypatch):
    """Stands for torch's compiler: names the folders in which it was called."""
    folders = []

    def compile_in(name, sources, build_directory, **options):
        folders.append(Path(build_directory))
        time.sleep(0.05)
        Path(build_directory, f"{name}.so").write_text("machine code")

    monkeypatch.setattr(cpp_extension, "load", compile_in)
    monkeypatch.setattr(building, "_import", Path.read_text)
    return folders


def test_processes_that_come_at_once_wait_for_the_one_that_compiles(compiled):
    # A lock of a file knows no threads: two that open it are as two processes.
    loaded = []
    threads = [threading.Thread(target=lambda: loaded.append(building.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert sorted(loaded, key=str) == [None, *["machine code"] * 3]


def test_a_build_that_fails_leaves_nothing(compiled, monkeypatch):
    def fail(name, sources, build_directory, **options):
        Path(build_directory, f"{name}.so").write_text("half of it")
        raise RuntimeError("no memory left")

    with monkeypatch.context() as broken:
        broken.setattr(cpp_extension, "load", fail)
        with pytest.raises(RuntimeError, match="no memory left"):
            building.load()
    assert [path.name for path in building._folder().iterdir()] == ["lock"]
    building.load()
    assert building.load() == "machine code"


def test_what_a_killed_build_left_is_removed(compiled):
    abandoned = building._folder() / "build-killed"
    abandoned.mkdir(parents=True)
    (abandoned / "penstock_emulated_devices.so").write_text("half of it")
    building.load()
    assert building.load() == "machine code"
    assert sorted(path.suffix for path in building._folder().iterdir()) == ["", ".so"]


def test_another_source_torch_or_compiler_is_another_folder(tmp_path, monkeypatch):
    folders = [building._folder(), building._folder()]
    monkeypatch.setenv("CXX", "clang++")
    folders.append(building._folder())
    monkeypatch.setattr("torch.__version__", "3.0")
    folders.append(building._folder())
    copied = shutil.copytree(building._SOURCES, tmp_path / "device")
    monkeypatch.setattr(building, "_SOURCES", copied)
    assert building._folder() == folders[-1]
    (copied / "ledger.cpp").write_text("// nothing is checked")
    folders.append(building._folder())
    assert len(set(folders)) == len(folders) - 1
    assert all(tmp_path in folder.parents for folder in folders)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "there is no no-such-compiler" in building.why_not()
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(building, "path", lambda: "/nowhere")
    assert building.why_not() == "the emulated accelerator needs ninja: pip install ninja"


TESTS = {
    "conftest.py": """
from tests.kit.accelerator.own_process import (
    accelerator, pytest_collection_modifyitems, pytest_runtest_logreport, pytest_runtest_protocol,
)

def pytest_sessionstart():
    import sys, types
    module = types.ModuleType("tests.kit.accelerator.devices")
    module.register = stand_in
    sys.modules["tests.kit.accelerator.devices"] = module

def stand_in():
    from unittest import mock
    return mock.Mock(device_count=lambda: 0)
""",
    "test_one.py": """
import os, pytest

def test_here():
    assert "PENSTOCK_ACCELERATOR" not in os.environ

@pytest.mark.skip(reason="not now")
def test_skipped(accelerator):
    raise AssertionError

def test_there(accelerator):
    assert os.environ["PENSTOCK_ACCELERATOR"] != "here"

@pytest.mark.parametrize("number", [1, 2])
def test_numbers(number, accelerator):
    assert number == 1, "number two"

""",
    "test_two.py": """
import os

def test_crash(accelerator):
    os._exit(3)

def test_behind(accelerator):
    pass
""",
    "test_three.py": """
def test_hidden(request):
    request.getfixturevalue("accelerator")
""",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").touch()
    return tmp_path


def run_tests(folder, **environment):
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"]
    return subprocess.run(
        command,
        cwd=folder,
        env={**ENVIRONMENT, "CXX": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    ).stdout


def test_another_process_s_results_are_this_one_s(folder):
    output = run_tests(folder)
    assert "PASSED test_one.py::test_here" in output
    assert "PASSED test_one.py::test_there" in output
    assert "PASSED test_one.py::test_numbers[1]" in output
    assert "FAILED test_one.py::test_numbers[2] - AssertionError: number two" in output
    assert "not now" in output
    assert "FAILED test_two.py::test_crash" in output
    assert "ended with code 3 before this test did" in output
    assert "FAILED test_two.py::test_behind" in output
    assert "ERROR" not in output
    assert "FAILED test_three.py::test_hidden - Failed: name the fixture among" in output
    assert "4 failed, 3 passed, 1 skipped" in output


def test_without_a_compiler_they_are_skipped(folder):
    output = run_tests(folder, CXX="no-such-compiler")
    assert "there is no no-such-compiler" in output
    assert "1 failed, 1 passed, 6 skipped" in output


LATE_AND_FORKED = """
import os
import torch

def outcome(run):
    child = os.fork()
    if child == 0:
        try:
            run()
        except RuntimeError as error:
            print(str(error).splitlines()[0], flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def train():
    from tests.kit.accelerator.devices import register
    register()
    weight = torch.ones(3, device="emu:2", requires_grad=True)
    (weight * weight).sum().backward()
    assert weight.grad.tolist() == [2, 2, 2]

def late():
    torch.ones(3, requires_grad=True).sum().backward()
    train()

def forked():
    from tests.kit.accelerator.devices import register
    register()
    torch.Stream("emu:2").record_event().synchronize()
    if outcome(train):
        raise RuntimeError("a fork of a process that had allocated nothing")

print(outcome(late), outcome(forked))
"""


def test_an_accelerator_comes_before_the_first_backward_and_may_be_forked_before_its_first_use(
    monkeypatch,
):
    """Why tests of the devices have a process of their own: a late accelerator has no threads."""
    monkeypatch.undo()  # the cache that everybody shares
    if (missing := building.why_not()) is not None:
        pytest.skip(missing)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LATE_AND_FORKED],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["1 0"], done.stdout + done.stderr
    assert "device_ready_queues_" in done.stdout
