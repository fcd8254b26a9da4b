"""What is said where a library is not installed."""

import importlib
import sys

import pytest

from penstock.base.errors import InputError
from penstock.interop.spread import need


def test_a_missing_library_is_one_sentence():
    with pytest.raises(InputError, match=r"trains needs nonsense_library.*penstock\[nonsense\]'$"):
        need(("torch", "nonsense_library"), "nonsense", "what trains")


def test_what_lacks_something_itself_says_so(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        need(("broken_library",), "nonsense", "what trains")


@pytest.mark.parametrize(
    ("library", "adapter"), [("transformers", "huggingface"), ("lightning", "lightning")]
)
def test_adapters_say_which_extra_they_need(library, adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    for loaded in [name for name in sys.modules if name.startswith(f"penstock.interop.{adapter}")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(InputError, match=rf"needs {library}.*pip install 'penstock\[{adapter}\]'"):
        importlib.import_module(f"penstock.interop.{adapter}")
