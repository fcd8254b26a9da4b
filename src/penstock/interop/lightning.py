"""``PenstockStrategy``: a Lightning ``Trainer`` whose training steps go through a pipeline.

Needs the extra ``lightning``. A ``training_step`` is split at the loss: what it gives to
``self(…)`` goes through the pipeline, and what it gives to ``self.loss(outputs, targets)`` beside
the outputs goes to where the last stage ends. Everything else in it, and everything around it
(``self.log``, callbacks, loggers, clipping, accumulation, manual optimization, checkpoints), is
Lightning's own, because the loss goes backward into the module's own parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from penstock.base.errors import InputError, ModelError
from penstock.base.values import expect
from penstock.engine.model.microbatches import Weight
from penstock.interop.loss_pipeline import (
    HasLossPipeline,
    LossPipeline,
    OutputsAreGone,
    let_state_follow,
)
from penstock.interop.spread import Spread, need

need(("lightning",), "lightning", "penstock.interop.lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402 - after the sentence
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402

_EXAMPLE = "def loss(self, outputs, targets): return F.cross_entropy(outputs, targets)"


class PenstockStrategy(HasLossPipeline, SingleDeviceStrategy):
    """Trains and evaluates a ``LightningModule`` through a pipeline in this process.

    The module has a method ``loss(outputs, targets)``, a mean over rows, and its ``training_step``
    gives it what ``self(…)`` returned; it may be used with any other strategy, too. Losses and
    weights are those of one device up to rounding, but for what random layers draw.

    Args:
        spread: the plan, or how to make one when the first batch comes.
        weight: for a mean over something else than rows: how many terms the targets of one
            microbatch contribute, as for ``penstock.Pipeline``.
        device: where batches and what is no part of the model's spine are.
        named: as for Lightning's ``SingleDeviceStrategy``.

    Raises:
        InputError: no ``Spread``.
    """

    strategy_name = "penstock"

    def __init__(
        self,
        spread: Spread | None = None,
        *,
        weight: Weight | None = None,
        device: Any = "cpu",
        **named: Any,
    ) -> None:
        super().__init__(device=device, **named)
        spread = Spread() if spread is None else spread
        expect(spread, Spread, "spread", "give penstock.interop.spread.Spread(stages=2)")
        self.spread = spread
        self._weight = weight
        self._split: LossPipeline | None = None
        self._written: dict[str, Any] = {}
        self._replaced: dict[str, Any] = {}

    @property
    def _module(self) -> Any:
        """The ``LightningModule``, of whose methods mypy knows nothing."""
        return self.lightning_module

    def setup(self, trainer: Any) -> None:
        """As Lightning's.

        Raises:
            InputError: gradients would have to be scaled, which a pipeline here does not do; or the
                trainer is to have several processes.
            ModelError: the module was compiled, or has no ``loss``.
        """
        _check_one_process(trainer)
        # Whom Lightning has unwrapped knows by this attribute what torch.compile made of it.
        if getattr(self.lightning_module, "_compiler_ctx", None) is not None:
            raise ModelError(
                "the LightningModule was compiled as a whole, so that it cannot be cut; leave "
                "torch.compile out, and build a new module if it has been compiled already"
            )
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            raise InputError(
                "PenstockStrategy does not scale losses, as 16-bit precision needs; take "
                "precision='bf16-mixed'"
            )
        if not callable(getattr(self.lightning_module, "loss", None)):
            raise ModelError(
                f"{type(self.lightning_module).__name__} has no method loss(outputs, targets), "
                f"where its training_step could be split; write {_EXAMPLE}, and let training_step "
                "call it"
            )
        super().setup(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's, whose ``self(…)`` waits for ``self.loss`` to run the batch."""
        with self._replacing(forward=self._promised, loss=self._loss_of_batch):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's, whose ``self(…)`` is evaluated by the pipeline."""
        with self._replacing(forward=self._evaluated):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's, whose ``self(…)`` is evaluated by the pipeline."""
        with self._replacing(forward=self._evaluated):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's, whose ``self(…)`` is evaluated by the pipeline."""
        with self._replacing(forward=self._evaluated):
            return super().predict_step(*args, **kwargs)

    def _promised(self, *args: Any, **kwargs: Any) -> _Promised:
        return _Promised(self._as_one(args, kwargs))

    def _evaluated(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._as_one(args, kwargs)
        with self._as_written():
            return self._loss_pipeline.evaluate(inputs)

    def _loss_of_batch(self, outputs: Any, targets: Any) -> Tensor:
        if not isinstance(outputs, _Promised):
            raise InputError(
                "self.loss must be given what self(…) returned in the same training_step, and as "
                f"it is; it was given a {type(outputs).__name__}"
            )
        number = self._module.trainer.fit_loop.total_batch_idx
        with self._as_written():
            loss = self._loss_pipeline.loss_of_batch(
                outputs.inputs, targets, weight=self._weight, number=number
            )
        for optimizer in self.optimizers:
            let_state_follow(optimizer)
        return loss.to(self.root_device)

    def _as_one(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of ``forward`` as one value: alone, a tuple, or a dictionary."""
        if not kwargs:
            return args[0] if len(args) == 1 else args
        forward = type(self._module).forward
        bound = inspect.signature(forward).bind(self._module, *args, **kwargs)
        return dict([*bound.arguments.items()][1:])

    @property
    def _loss_pipeline(self) -> LossPipeline:
        module = self._module
        if self._split is None or self._split.model is not module:
            self._split = LossPipeline(module, self.spread, module.loss, name="PenstockStrategy")
        return self._split

    @contextmanager
    def _replacing(self, **methods: Any) -> Iterator[None]:
        """Whoever calls these methods of the module meanwhile calls others."""
        own = vars(self.lightning_module)
        self._written = {name: own[name] for name in methods if name in own}
        self._replaced = methods
        own.update(methods)
        try:
            yield
        finally:
            _put_back(own, methods, self._written)

    @contextmanager
    def _as_written(self) -> Iterator[None]:
        """While the pipeline calls the module, its methods are its own."""
        own = vars(self.lightning_module)
        _put_back(own, self._replaced, self._written)
        try:
            yield
        finally:
            own.update(self._replaced)

    def teardown(self) -> None:
        """End the pipeline's workers; then as Lightning's."""
        if self._split is not None:
            self._split.close()
        super().teardown()


def _check_one_process(trainer: Any) -> None:
    """See that a trainer asks for no more than this process.

    Raises:
        InputError: it does.
    """
    connector = trainer._accelerator_connector  # what a strategy of one device has no use for
    devices = len(connector._parallel_devices)
    if devices == trainer.accelerator.auto_device_count():
        devices = 1  # who asks for nothing gets all there are, and this strategy has one of them
    asked = {"devices": devices, "num_nodes": connector._num_nodes_flag}
    for option, count in asked.items():
        if count > 1:
            raise InputError(
                "PenstockStrategy has its ranks as threads of one process, and the Trainer has "
                f"{option}={count}; leave {option} out (Spread says with stages and devices "
                "where ranks are), or train with penstock.Pipeline under torchrun"
            )


class _Promised(OutputsAreGone):
    """The result of ``self(…)`` in training: it has the inputs, and no outputs."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.inputs = inputs


def _put_back(own: dict[str, Any], replaced: dict[str, Any], written: dict[str, Any]) -> None:
    for name in replaced:
        own.pop(name, None)
    own.update(written)
