"""``Pipeline``: the five lines that a training script changes."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.base.arguments import public
from penstock.base.errors import InputError, RunError
from penstock.base.telling import Telling
from penstock.base.tracebacks import shorten
from penstock.base.values import MOST_AMOUNT, expect, flag, number
from penstock.engine.device.accelerators import Devices
from penstock.engine.model import microbatches
from penstock.engine.model.batches import LABELS, BatchSplit, is_batch, model_loss
from penstock.engine.model.microbatches import Microbatches, Weight, Weighting
from penstock.engine.model.optimizer_factory import OptimizerFactory, SchedulerFactory
from penstock.engine.model.randomness import Audit
from penstock.engine.model.spine import evaluation_mode
from penstock.engine.run.assembly import Results, Running
from penstock.engine.run.building import build
from penstock.engine.run.drive.driver import Deadlines, told
from penstock.engine.run.drive.joining import TransportName
from penstock.engine.run.handles import StepLoss
from penstock.engine.run.materialising import Init
from penstock.engine.run.minibatch import Minibatch, StreamPosition
from penstock.engine.run.outcome import MinibatchOutcome
from penstock.engine.run.recipe import BatchNormStatistics, Loss, LossScale, Metric, Recipe
from penstock.engine.stage.backends import Backend, backend_of
from penstock.planning.plans import Plan
from penstock.training.checkpoint.saving import Checkpoints, InCourse
from penstock.training.pipeline.habits import ARGUMENTS, BATCH, EVALUATED
from penstock.training.pipeline.state import PipelineState


class Pipeline(PipelineState):
    """Trains a model as a plan says, with the results of one device.

    Under plain ``python`` every rank runs in a thread of this process; under ``torchrun`` each
    process runs one rank, and every process must make the same calls. The model's own parameters
    are trained in place (under ``torchrun``, those of this rank's stages). Under ``torchrun`` the
    plan and the seed of rank 0 count, so every process may profile and plan for itself.

    Args:
        model: what was profiled: an ``nn.Sequential``, a module with a ``spine`` (see
            ``engine.model.spine``), or any other, which is cut as ``profile`` has traced it.
        plan: made for this model; its layers are checked against it.
        loss: from (output, targets) of one microbatch to a scalar tensor. Needed by ``step``,
            unless the model was profiled with labels among its inputs and gives a ``loss`` itself.
        optimizer: makes an optimizer of the parameters it is given, once per stage; they are a list
            with a method ``named()``, for parameter groups. Without one, ``step`` only accumulates
            gradients in ``.grad``.
        lr_scheduler: makes a learning-rate scheduler of an optimizer; stepped after every update,
            or, if it waits for a metric, as ``ReduceLROnPlateau``, by ``schedulers.step(metric)``.
        clip_norm: the most that the norm of the whole model's gradients may be, as
            ``torch.nn.utils.clip_grad_norm_`` on one device. Not without a flush, where gradients
            of different stages are never those of the same update.
        clip_stage_norm: the most that the norm of one stage's gradients may be; for pipelines that
            never flush.
        grad_scaler: a ``torch.amp.GradScaler``: the loss is scaled by it, updates with infinite
            gradients are skipped on every rank, and its scale follows. Under ``torchrun``, every
            process gives its own, in the same state.
        post_validate: do not wait for all ranks before an update that depends on them; a wrong one
            is undone and made again (arXiv 2401.10241, section 4), hooks on the optimizer included.
            Costs a copy of weights and optimizer state, pays off in ``steps``, and changes no
            result.
        metrics: by name, from (output, targets) of one microbatch to a number, weighted like the
            loss; see ``metrics``.
        results: whether losses, metrics and outputs are given on every rank, or on none, which
            saves a message per step.
        stop_at_nan: raise a ``StageError`` before any update if the loss of a microbatch is not
            finite; by default unless there is a ``grad_scaler``. On an accelerator it never does,
            since every microbatch would have to be waited for.
        devices: where ranks compute: ``"cpu"`` or another device for all, or a list with one for
            each rank of the plan, or each tensor rank of each (as torch names it, a
            ``torch.device``, or the number of an accelerator); ranks may share one. By default,
            ranks that were planned for accelerators take this process's in their order, under
            ``torchrun`` that of ``LOCAL_RANK``, and all others the CPU. Each stage of the model is
            moved to its rank's device.
        compile: run each stage's forward and backward as compiled functions, made in its first
            microbatch (seconds to minutes): ``True`` or ``"inductor"`` by torch's Inductor, which
            needs a C++ compiler on a CPU; ``"aot_eager"``: the operations of eager mode, called
            without modules and without a graph. Results are those of eager mode to rounding. What
            would change from pass to pass is refused: shapes, random draws, forward hooks, code
            that asks for values. Evaluation stays eager.
        init: ``"given"``: the model has the values with which it was built, and only what is on
            ``meta`` gets new ones. ``"per-layer"``: every layer draws its parameters anew by the
            ``reset_parameters`` of its modules, from the ``seed`` and its number in the model, so
            that the same model on ``meta`` would get the same values.
        initial_weights: a safetensors file, or a folder of several, with the model's initial values
            under the keys of its ``state_dict``, or the folder of ``save_pretrained``. The model
            may be on ``meta``: a process reads what its stages need, a layer at a time. Numbers of
            a narrower type than the model's are widened; what would lose digits is refused.
        transport: ``"threads"``; ``"shared-memory"`` or ``"process-group"`` between processes;
            ``"auto"``: threads if the job has one process, else shared memory between ranks of one
            host and the process group between hosts; tensors go straight from one accelerator to
            another where torch has a library for that.
        count_memory: count what every rank keeps for backwards, see ``peaks``. Costs a few per cent
            of a step.
        batch_norm: the running statistics of batch norm, with which the model is evaluated, are
            moved by every ``"microbatch"``, as by accumulation on one device, or once by each
            ``"minibatch"``, as by GPipe. Both normalise each microbatch by itself.
        seed: of dropout and other random layers; by default torch's initial seed. Draws depend on
            the seed, the step, the microbatch (or its slice) and the layer, on nothing else.
        reduction: ``"mean"`` if the loss is a mean over its rows, ``"sum"`` if it is a sum.
        weight: for a mean over something else than rows (say, tokens that are not padding): how
            many terms the targets of one microbatch contribute.
        deadline_seconds: how long an op may wait for another rank.
        startup_seconds: how long ranks wait for each other while the pipeline is built, and in its
            first minibatch, when they may still be importing, initialising or allocating. A process
            that has ended is missed at once, not at a deadline. Default: twice
            ``deadline_seconds``, and at least 60.
        message_types: classes of what stages hand to each other and of the model's output, beside
            tensors, numbers, texts and ``None`` in tuples, lists and dictionaries: NamedTuples,
            dataclasses, enumerations, and classes that are registered with torch's pytree. Between
            processes nothing else travels. Those of a captured model's output need not be named.
        compare_data: under ``torchrun``, raise an error if ranks are given different minibatches.
            Without, only the first stage's inputs and the last one's targets count; those of other
            ranks must have as many rows, and with ``weight`` the same targets.
        record: gather the timeline on every rank under ``torchrun``; threads always record.
        labels: the key of the targets in batches that have them inside, or a list of keys, of which
            the loss gets a dictionary. They are left out of what the model gets, unless the loss is
            ``penstock.model_loss`` or the model was captured with them.

    Attributes:
        plan: the one that is run.
        stages: this process's, by number; where tensor ranks share them, one member's parts.
        transport: how messages travel between ranks, and why so, as a sentence.

    Raises:
        ModelError: the model cannot be cut, or the plan is for another one.
        InputError: contradictory arguments, or a number of processes that the plan does not have.
        PeerError, DeadlineError: under ``torchrun``, another process failed or did not come.
    """

    @public(remedies=ARGUMENTS)
    def __init__(  # noqa: PLR0913 - the one place where everything meets
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss: Loss | None = None,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        clip_norm: float | None = None,
        clip_stage_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        post_validate: bool = False,
        metrics: Mapping[str, Metric] | None = None,
        results: Results = "every rank",
        stop_at_nan: bool | None = None,
        count_memory: bool = False,
        batch_norm: BatchNormStatistics = "microbatch",
        devices: Devices | None = None,
        compile: bool | Backend = False,
        init: Init = "given",
        initial_weights: str | os.PathLike[str] | None = None,
        transport: TransportName = "auto",
        seed: int | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        weight: Weight | None = None,
        deadline_seconds: float = 300.0,
        startup_seconds: float | None = None,
        message_types: Sequence[type] = (),
        compare_data: bool = True,
        record: bool = True,
        labels: str | Sequence[str] = LABELS,
    ) -> None:
        expect(plan, Plan, "the plan", "make one with penstock.plan, or Plan.load a file")
        deadlines = Deadlines.of(deadline_seconds, startup_seconds)
        BatchSplit.by(labels, loss, model)  # which may refuse the keys

        def described(model: nn.Module) -> tuple[Recipe, Running]:
            loss_scale = None if grad_scaler is None else LossScale.of(grad_scaler)
            recipe = Recipe(
                loss=model_loss if loss is None and getattr(model, "gives_loss", False) else loss,
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                clip_norm=clip_norm,
                clip_stage_norm=clip_stage_norm,
                loss_scale=loss_scale,
                post_validate=post_validate,
                metrics={} if metrics is None else metrics,
                stop_at_nan=loss_scale is None if stop_at_nan is None else stop_at_nan,
                batch_norm=batch_norm,
                count_memory=count_memory,
                versions=plan.versions,
                weighting=Weighting.of_loss(loss, reduction, weight),
            )
            return recipe, Running(
                transport=transport,
                seed=torch.initial_seed() if seed is None else seed,
                deadlines=deadlines,
                record=record,
                results=results,
                devices=devices,
                compile=backend_of(compile),
                init=init,
                weights=initial_weights,
                message_types=message_types,
                compare_data=compare_data,
            )

        with Telling("building a Pipeline"):
            built = build(model, plan, transport, deadlines, described)
        super().__init__(built, grad_scaler, results)
        self._parting = BatchSplit.by(labels, self._recipe.loss, self._model)
        self._joins_outputs: bool | None = None  # not known yet

    @public(otherwise=BATCH)
    def step(
        self, inputs: Any, targets: Any = None, *, update: bool = True, share: float = 1.0
    ) -> Tensor | None:
        """Train on one minibatch.

        Args:
            inputs: a tensor, or tensors nested in tuples, lists, mappings or dataclasses; rows
                first. Mappings and dataclasses come to the model as dictionaries, and what is no
                tensor comes with every microbatch. Any number of rows works; with fewer rows than
                microbatches there are fewer microbatches. Or ``penstock.Microbatches``, cut
                already, whose shapes may differ. With slices, the second dimension of every tensor
                is the sequence.
            targets: as ``inputs``, with as many rows. Without them, ``inputs`` is a whole batch as
                a loader gives it: a pair, or a mapping or dataclass with the targets inside, under
                the key that ``labels`` of this class names.
            update: whether weights are updated; otherwise gradients accumulate until they are.
            share: the factor on this minibatch's gradients, and not on the loss that is returned;
                1/n where n calls make one update.

        Returns:
            The loss of the minibatch, a scalar on every rank, as one device would give it; ``None``
            if the pipeline tells no results. Gradients have been made already: its ``backward``
            raises an ``InputError``.

        Raises:
            InputError: inputs and targets that do not fit together, or a batch without targets.
            StageError: a layer, the loss or the optimizer raised, or the loss is not finite.
            PeerError, DeadlineError: another rank died or did not answer.

        Gradients are computed even under ``torch.no_grad``, and ``torch.autocast`` around the call
        holds for the forward and the loss. After an error in threads, the same step may be tried
        again, unless the next call says otherwise; without an optimizer, clear ``.grad`` first, and
        with one, what earlier calls without an update have accumulated is dropped. Buffers, such as
        batch-norm statistics, keep what the failed step did to them.
        """
        self._check_can_train()
        flag("update", update)
        number("share", share, most=MOST_AMOUNT)
        if targets is None:
            inputs, targets = self._parting.parted(inputs, "the batch")
        minibatch = self._parts.cutter.to_train(
            inputs, targets, step=self._step, share=share, updates=update, waits=True
        )
        if update:
            self._silence.before()
        with self._exclusively(), self._parts.streams.auditing():
            self._accumulates = False  # what has accumulated is dropped if it fails
            self._history.work.begin(minibatch)
            (outcome,) = self._parts.feed.train([(minibatch, StreamPosition())])
            self._accumulates = not update and self._recipe.optimizer is not None
            if update:
                self._silence.after()
            return self._loss_of(outcome)

    @public()
    def steps(
        self, batches: Iterable[Any], *, checkpoints: Checkpoints | None = None
    ) -> Generator[Tensor | None, None, None]:
        """Train on one minibatch after another; each begins before the results of the one before
        are gathered.

        A rank goes on to the next minibatch as soon as its own ops of the last are done, so ranks
        wait for each other less than with ``step`` (by how much, ``Timeline.bubble`` and
        ``Timeline.stage_bubble`` of the schedule say); weights and losses are the same.

        Args:
            batches: what a loader gives, each as for ``step``: pairs (inputs, targets), or mappings
                or dataclasses with the targets inside.
            checkpoints: where to save in the course of the loop, and how often.

        Yields:
            The loss of each minibatch, in order, as ``step`` returns it. The next minibatch is
            under way then, so weights may be used only after the loop.

        Raises:
            FileError: a checkpoint could not be written; else as ``step``.
        """
        expect(batches, Iterable, "the loader", "give an iterable of batches")
        if checkpoints is not None:
            expect(
                checkpoints, Checkpoints, "checkpoints", 'give pk.Checkpoints("runs/a", every=9)'
            )
        self._silence.before()
        saving = InCourse(checkpoints, self.plan, self._keeper)
        with self._exclusively(), self._parts.streams.auditing() as audit:
            try:
                taken = self._open(batches, audit)
                for stretch in saving.stretches(taken, self._step):
                    pairs = self._parting.pairs(stretch)
                    minibatches = self._parts.cutter.minibatches(pairs, self._step)
                    noted = self._history.work.noting(saving.marked(minibatches))
                    for outcome in self._parts.feed.train(noted):
                        loss = self._loss_of(outcome)
                        self._accumulates = False  # it has updated
                        saving.save_if_due(self._step)
                        with audit.elsewhere():
                            yield loss
            except RunError as error:
                self._check_open()  # the caller may have closed it in the loop
                shorten(error)
                raise
            except BaseException as error:
                # The caller has left the loop, or the loader has raised: end what was begun.
                try:
                    self._end()
                except RunError as failure:
                    if isinstance(error, GeneratorExit):
                        raise
                    error.add_note(f"What was under way could not be ended: {told(failure)}")
                raise

    def _open(self, batches: Iterable[Any], audit: Audit) -> Iterator[Any]:
        for batch in audit.taken(batches):
            self._check_can_train()  # the caller may have closed it meanwhile
            self._check_as_captured()
            yield batch

    def _end(self) -> None:
        """Let minibatches come to their end, and settle what was done on trust."""
        if not self._closed:
            for outcome in self._parts.feed.drain(self._step + len(self._parts.feed.under_way)):
                self._loss_of(outcome)

    @public(otherwise=EVALUATED)
    def evaluate(self, inputs: Any) -> Any:
        """Run forward only, in evaluation mode and without gradients.

        Args:
            inputs: as for ``step``, any number of rows. Labels that the model would not get in
                training are left out of a mapping or a dataclass.

        Returns:
            The model's outputs for all rows, on every rank; of ``penstock.Microbatches`` a list. If
            the pipeline tells no results, ``None``. Where outputs of microbatches cannot be joined,
            such as a loss that the model computes from labels among its inputs, or rows that are
            no rows of the inputs, all rows go through as one microbatch.
        """
        inputs = self._parting.inputs_of(inputs)
        if self._joins_outputs is False and not isinstance(inputs, Microbatches):
            return self.evaluate(Microbatches([inputs]))[0]
        minibatch = self._parts.cutter.to_evaluate(inputs, step=self._step)
        outcome = self._evaluated(minibatch)
        if self._results == "none":
            return None
        outputs = microbatches.join_slices(list(outcome.outputs), minibatch.num_slices)
        if isinstance(inputs, Microbatches):
            return outputs
        rows = minibatch.inputs[:: minibatch.num_slices]
        if self._joins_outputs or microbatches.have_rows_of(outputs, rows):
            return microbatches.join(outputs)
        if len(outputs) == 1:
            return outputs[0]
        # Several rows per row of the input can be joined, and a number that is always the same
        # cannot: what one device gives tells which it is, once.
        whole = self.evaluate(Microbatches([inputs]))[0]
        self._joins_outputs = microbatches.add_up_to(outputs, whole)
        return whole

    @public(otherwise=BATCH.replace("step(", "evaluate_loss("))
    def evaluate_loss(self, batches: Any, targets: Any = None) -> Tensor | None:
        """The loss on data that is not trained on: forward only, in evaluation mode and without
        gradients. No output leaves the last stage.

        Args:
            batches: a loader of batches, each as for ``step``, or one batch.
            targets: with them, ``batches`` are the inputs of a single batch.

        Returns:
            The loss of all rows as if they were one minibatch, on every rank: the mean over rows
            (or over what ``weight`` counts), with ``reduction="sum"`` the sum. ``None`` if the
            pipeline tells no results.

        Raises:
            InputError: there is no batch, or as ``step``.
            StageError, PeerError, DeadlineError: as ``step``.
        """
        self._check_can_train()
        pairs: Iterable[tuple[Any, Any]]
        if targets is not None:
            pairs = [(batches, targets)]
        elif is_batch(batches):
            pairs = [self._parting.parted(batches, "the batch")]
        else:
            expect(batches, Iterable, "what to evaluate", "give a batch or a loader of batches")
            pairs = self._parting.pairs(batches)
        total, num_terms, kind = 0.0, 0.0, None
        for minibatch, terms in self._parts.cutter.judged(pairs, step=self._step):
            loss = self._evaluated(minibatch).loss
            num_terms += terms
            if loss is not None and self._results == "every rank":
                kind = loss.dtype
                total += float(loss) * (terms if self._recipe.averages else 1.0)
        if not num_terms:
            raise InputError("there is no batch to evaluate: the loader gives none")
        if kind is None:
            return None
        return torch.tensor(total / num_terms if self._recipe.averages else total, dtype=kind)

    def _evaluated(self, minibatch: Minibatch) -> MinibatchOutcome:
        """Run forward only, in evaluation mode and without gradients."""
        if self.plan.spill is not None:
            with self._settled():
                pass
        own = (layer.module for stage in self.stages.values() for layer in stage.layers)
        layout = self._parts.layout
        with (
            self._exclusively(),
            # Of all stages: ranks in processes compare the modes of all layers.
            evaluation_mode(self._model, *layout.layers, *own, *layout.copies),
            self._parts.streams.auditing(),
        ):
            return self._parts.feed.evaluate(minibatch)

    def _check_can_train(self) -> None:
        self._check_open()
        if self._recipe.loss is None:
            raise InputError("Pipeline was built without a loss; give loss=… to train")

    def _loss_of(self, outcome: MinibatchOutcome) -> Tensor | None:
        self._history.add(outcome)
        self._history.work.end(self._step)
        self._elsewhere.stale = True
        self._step += 1
        return StepLoss.of(outcome.loss) if self._results == "every rank" else None
