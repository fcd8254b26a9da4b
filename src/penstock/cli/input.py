"""The inputs of verbs: a file by its name, or ``-``, standard input, whose beginning tells the kind
of file; a workload, as a function of a module; and the options that were given, so that one which
changes nothing is refused and not passed over.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from penstock.base.errors import FileError, InputError, ModelError, PenstockError
from penstock.base.mistaken import name_as_file
from penstock.base.telling import Telling
from penstock.base.values import MOST_FILE_BYTES, read_stream, read_text

if TYPE_CHECKING:
    from penstock.core.cluster import Cluster
    from penstock.planning.plans import Plan
    from penstock.trial import Workload
    from penstock.trial.workload import Batch


STANDARD_INPUT = "-"
_TEXT, _TAKEN = "penstock.standard_input", "penstock.standard_input_of"


class InputFile(click.Path):
    """The name of a file to read, or ``-`` for standard input, which one parameter may have.

    Args:
        wanted: the name of the class whose value the file is to hold.
    """

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self._wanted = wanted

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a second parameter that would read standard input, and a schedule's name."""
        name = str(super().convert(value, param, ctx))
        take(name, ctx)
        if not Path(name).exists() and (refusal := name_as_file(name, self._wanted)):
            raise InputError(refusal)
        return name


def take(name: str, ctx: click.Context | None) -> None:
    """Note that a parameter reads standard input, if its value is ``-``.

    Raises:
        UsageError: another one does so already.
    """
    if name != STANDARD_INPUT or ctx is None:
        return
    if ctx.meta.get(_TAKEN):
        raise click.UsageError(
            "- is standard input, which can be read once; give the name of a file for the others",
            ctx,
        )
    ctx.meta[_TAKEN] = True


def title_of(name: str) -> str:
    """The name of an input in errors."""
    return "standard input" if name == STANDARD_INPUT else name


def text_of(name: str, most_bytes: int = MOST_FILE_BYTES) -> str:
    """The text of a file or of standard input, which is read once and kept.

    Raises:
        FileError: it cannot be read, or nothing comes from standard input.
    """
    if name != STANDARD_INPUT:
        return read_text(name, most_bytes)
    kept = click.get_current_context().meta
    if _TEXT not in kept:
        kept[_TEXT] = read_stream(sys.stdin.buffer, title_of(name), most_bytes)
        if not kept[_TEXT].strip():
            raise FileError("standard input is empty; pipe a file into it, or give a file's name")
    return str(kept[_TEXT])


def suffix_of(name: str, otherwise: str) -> str:
    """How a file's name ends, in small letters. Standard input has no name: what begins as JSON
    does is ``.json``, anything else ``otherwise``."""
    if name != STANDARD_INPUT:
        return Path(name).suffix.lower()
    return ".json" if text_of(name).lstrip().startswith("{") else otherwise


def stem_of(name: str) -> str:
    """The name that a value without one has after its file."""
    return title_of(name) if name == STANDARD_INPUT else Path(name).stem


def load_cluster(name: str) -> Cluster:
    """The cluster in a file (``.toml`` for what people write, anything else is JSON), or machines
    of the catalogue, as ``dgx-h100`` or ``8xh100-sxm``.

    Raises:
        FileError: it holds something else.
        InputError: it is no file's name, and the catalogue has no such machine.
    """
    from penstock.core.cluster import Cluster

    if name != STANDARD_INPUT:
        is_file = Path(name).suffix.lower() in {".toml", ".json"} or Path(name).exists()
        if is_file or len(Path(name).parts) > 1:
            return Cluster.load(name)
        try:
            return Cluster.of(name)
        except InputError as error:
            raise InputError(f"there is no file {name!r}, and {error}") from None
    read = Cluster.from_json if suffix_of(name, ".toml") == ".json" else Cluster.from_toml
    return read(text_of(name), where=title_of(name))


_SHAPE = ("ranks", "microbatches")
_OWN = {".csv": _SHAPE, ".json": (*_SHAPE, "costs")}
_FIGURES = (".svg", ".pdf", ".png")


def is_given(name: str) -> bool:
    """Whether the parameter of the running verb was given, rather than left at its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def refuse_useless(names: Iterable[str], why: str) -> None:
    """Refuse options that were given but would change nothing.

    Args:
        names: of the running verb's parameters.
        why: they would not, as the first half of a sentence.

    Raises:
        InputError: one or several of them were given.
    """
    context = click.get_current_context()
    asked = set(names)
    useless = [
        max(parameter.opts, key=len)
        for parameter in context.command.params
        if parameter.name in asked and is_given(parameter.name)
    ]
    if useless:
        raise InputError(f"{why}; leave {' and '.join(useless)} out")


def check_source(source: str, of_use: Collection[str] = ()) -> None:
    """Refuse what only schedules by name take, if ``source`` is a file that says it itself.

    Args:
        of_use: what is not refused beside a plan or a timeline.

    Raises:
        InputError: the number of ranks or of microbatches was given, or costs beside a ``.json``.
    """
    own = _said_by(source)
    if own:
        said = f"{', '.join(own[:-1])} and {own[-1]}"
        refuse_useless(set(own).difference(of_use), f"{title_of(source)} says its {said} itself")


def check_sources(sources: Sequence[str]) -> None:
    """Refuse what only schedules by name take, if all sources are files that say it themselves."""
    for name in (*_SHAPE, "costs"):
        if all(name in _said_by(source) for source in sources):
            refuse_useless([name], f"files say their {name} themselves")


def _said_by(source: str) -> tuple[str, ...]:
    """Which parameters of schedules a file holds."""
    return _OWN.get(suffix_of(source, ".csv"), ())


def check_width(output: str | None) -> None:
    """Refuse a width of what is no figure."""
    if output is None or (output != "-" and Path(output).suffix.lower() not in _FIGURES):
        refuse_useless(
            ["width"], "only figures have a width, and what is written is none (.svg, .pdf or .png)"
        )


Made = TypeVar("Made")

DEFAULT_WORKLOAD = "penstock.demo:workload"


def load_workload(name: str) -> Workload:
    """Import ``module:function`` and call it.

    Returns:
        The workload; where its ``build_model`` or ``batches`` raises, one message says so.

    Raises:
        ModelError: it cannot be imported, raises, or does not return a ``Workload``.
    """
    with Telling(f"loading {name}"):
        return _loaded(name)


def load_workload_of(plan: Plan, path: str, name: str) -> Workload:
    """As ``load_workload``, of the workload that a plan is to train, which the parameter
    ``workload`` of the running verb names.

    Args:
        plan: it is compared only where nobody named a workload, so that the demo's is taken.
        path: of the plan's file, for errors.

    Raises:
        ModelError: the plan is for another model than the demo's.
    """
    workload = load_workload(name)
    if not is_given("workload"):
        from penstock.engine.model.spine import spine_of
        from penstock.engine.run.building import in_layers

        model = in_layers(workload.build_model(), plan)
        layers = tuple(layer.name for layer in spine_of(model))
        if layers != plan.layers:
            raise ModelError(
                f"{path} is not for the demo's model ({name}), which is taken where no workload is "
                "named; name yours behind the plan, as module:function"
            )
    return workload


def _loaded(name: str) -> Workload:
    from penstock.trial import Workload

    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise InputError(
            f"{name!r} names no workload; write module:function, for example {DEFAULT_WORKLOAD}, "
            "where the function returns a penstock.trial.Workload"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        workload = _made(
            f"the workload {name}", partial(_imported, name, module_name, function_name)
        )
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(workload, Workload):
        raise ModelError(
            f"{name} returned a {type(workload).__name__}; return a penstock.trial.Workload"
        )
    return replace(
        workload,
        build_model=partial(_made, f"build_model of the workload {name}", workload.build_model),
        batches=partial(_iterated, f"batches of the workload {name}", workload.batches),
    )


def _imported(name: str, module_name: str, function_name: str) -> object:
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"cannot load the workload {name!r}: {error}") from error
    return function()


def _made(role: str, make: Callable[[], Made]) -> Made:
    with _blamed(role):
        return make()


def _iterated(role: str, make: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    with _blamed(role):
        yield from make()


@contextmanager
def _blamed(role: str) -> Iterator[None]:
    """Turn an error of the user's own code into one message, with its line."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        from penstock.engine.tracing.lines import because, lines_of

        said = f"{role} raised {type(error).__name__}: {error}{because(lines_of(error))}"
        raise ModelError(said) from error
