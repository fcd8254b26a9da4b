"""Random streams that belong to a microbatch and a layer, not to a thread or a device.

torch draws dropout masks from one process-wide generator, so results depend on who draws first:
on the partition, the schedule and the timing of threads. Here every (step, microbatch, layer) has a
generator of its own, derived from one seed. A pipeline with any number of stages, and a single
device, then draw the same masks.

Redirecting costs about 10 µs per operation, so only layers that draw are redirected: a layer is
watched when it first runs, and an ``Audit`` notices one that starts drawing later: torch's default
generator moves then. The caller's code may move it too, and while that runs, nobody can tell who
did. After that all layers are watched once more; if one draws now, it was right to doubt.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from penstock.base.errors import InputError
from penstock.engine.device.accelerators import lent_generator
from penstock.engine.model.modes import Args, DispatchMode, FunctionMode, Named

V = TypeVar("V")

_DEFAULT_GENERATOR_LOCK = threading.Lock()


class RandomStream(DispatchMode):
    """While active in a thread, every random operation draws from a stream of its own.

    Attributes:
        drew: whether any operation drew.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self.drew = False

    def call(self, func: Any, args: Args, named: Named) -> Any:
        """Run ``func``, giving it our generator if it draws and was given none."""
        if not draws(func, args, named):
            return func(*args, **named)
        self.drew = True
        generator = self._generator(_device_of(args, named))
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **{**named, "generator": generator})
        return _with_default_generator(generator, func, args, named)

    def repeat(self, other: RandomStream) -> None:
        """Draw from its beginning what another stream draws."""
        self._seed = other._seed
        self._generators.clear()

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws from a default generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        return False
    for position, argument in enumerate(func._schema.arguments):
        # Fused attention bears the tag with and without dropout.
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given)
    return True


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if tensors:
        return tensors[0].device
    return torch.device(kwargs.get("device") or "cpu")


def _with_default_generator(
    generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """For operations that can only draw from the default generator: lend it our state."""
    with _DEFAULT_GENERATOR_LOCK, lent_generator(generator):
        return func(*args, **kwargs)


def current_stream() -> RandomStream | None:
    """The stream from which this thread draws now; ``None`` where nobody redirects it."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, RandomStream) else None


class _RefusingDraws(DispatchMode):
    """Raises where an operation would draw."""

    def call(self, func: Any, args: Args, named: Named) -> Any:
        if draws(func, args, named):
            raise InputError(
                f"{func} draws random numbers during backward. Recomputing dropout (activation "
                "checkpointing) would draw another mask than forward did: keep dropout outside of "
                "what is checkpointed"
            )
        return func(*args, **named)


class NoDraws(FunctionMode):
    """While active, Python code that autograd calls, such as a recomputation, must not draw.

    Autograd's own operations do not pass through here, so an ordinary backward pays nothing.
    """

    def call(self, func: Any, args: Args, named: Named) -> Any:
        """Run ``func`` and refuse draws inside it, unless it draws from a stream of ours."""
        # A layer that we recompute ourselves draws again what it drew before.
        if isinstance(_get_current_dispatch_mode(), RandomStream):
            return func(*args, **named)
        with _RefusingDraws():
            return func(*args, **named)


def stream_seed(seed: int, step: int, microbatch: int, layer: int, part: int = 0) -> int:
    """The seed of one microbatch's stream at one layer: 63 bits, the same on every machine.

    ``part``: which slice of the microbatch; the first one draws as the whole would.
    """
    text = f"{seed}/{step}/{microbatch}/{layer}{f'/{part}' if part else ''}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class LayerStreams:
    """Hands out the streams of one model, and knows which layers need none.

    Args:
        seed: every stream is derived from it.

    Attributes:
        num_changes: grows after every change of which layers are quiet.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.num_changes = 0
        self._quiet: set[tuple[int, bool]] = set()
        self._doubted: set[tuple[int, bool]] = set()
        self._late = False
        self._num_doubts = 0

    def stream(
        self, layer: int, training: bool, step: int, microbatch: int, part: int = 0
    ) -> AbstractContextManager[RandomStream | None]:
        """The context in which a layer must run.

        Args:
            layer: its index in the whole spine.
            part: number of the slice of the microbatch.
        """
        if (layer, training) in self._quiet:
            return contextlib.nullcontext()
        return RandomStream(stream_seed(self.seed, step, microbatch, layer, part))

    def is_quiet(self, layer: int, training: bool) -> bool:
        """Whether ``layer`` is known to draw nothing, so that it needs no stream."""
        return (layer, training) in self._quiet

    def learn(self, layer: int, training: bool, stream: RandomStream | None) -> None:
        """Remember whether the layer drew; call after it ran."""
        if stream is None:
            return
        if stream.drew:
            self._late = self._late or (layer, training) in self._doubted
        else:
            self._quiet.add((layer, training))
            self.num_changes += 1
        self._doubted.discard((layer, training))

    def auditing(self) -> Audit:
        """A context in which layers run, and which warns of one that has begun to draw."""
        return Audit(self)

    def doubt(self) -> None:
        """A quiet layer may have drawn, or the caller's code: watch all layers once more.

        Watching costs time, and a loader may draw before every minibatch. So only the first doubt
        of a pipeline has consequences, the second, the fourth, the eighth and so on.
        """
        self._num_doubts += 1
        if self._num_doubts.bit_count() == 1:
            self._doubted |= self._quiet
            self._quiet.clear()
            self.num_changes += 1

    def judge(self, *, moved: bool) -> bool:
        """Whether a layer has drawn that was quiet before.

        Args:
            moved: whether torch's default generator moved while only layers can have moved it.
        """
        late, self._late = self._late or moved, False
        if moved:
            self._quiet.clear()
            self._doubted.clear()
            self.num_changes += 1
        return late


class Audit:
    """Compares torch's default CPU generator before and after layers have run."""

    def __init__(self, streams: LayerStreams) -> None:
        self._streams = streams

    def __enter__(self) -> Self:
        self._before = _default_state()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None or issubclass(kind, GeneratorExit):
            self._check()

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """A context for the caller's code, which may draw; layers may run meanwhile."""
        self._check()
        try:
            yield
        finally:
            if self._moved():
                self._streams.doubt()

    def taken(self, values: Iterable[V]) -> Iterator[V]:
        """Iterate over values that the caller's code makes, which may draw."""
        remaining = iter(values)
        while True:
            with self.elsewhere():
                try:
                    value = next(remaining)
                except StopIteration:
                    return
            yield value

    def _check(self) -> None:
        if self._streams.judge(moved=self._moved()):
            warnings.warn(
                "a layer drew random numbers for the first time after its first run; draws up to "
                "now depend on timing, later ones will not",
                stacklevel=6,
            )

    def _moved(self) -> bool:
        before, self._before = self._before, _default_state()
        return not torch.equal(before, self._before)


def _default_state() -> torch.Tensor:
    with _DEFAULT_GENERATOR_LOCK:  # it may be lent just now
        return torch.get_rng_state()
