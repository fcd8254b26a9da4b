"""How a model that another library trains is to be spread, and the pipeline that this makes; and
``need``, for libraries that an extra brings.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from penstock.base.errors import InputError
from penstock.base.values import expect, whole
from penstock.core.cluster import Cluster
from penstock.core.example import Dynamic, Granularity
from penstock.engine.device.accelerators import Devices
from penstock.engine.run.recipe import Loss
from penstock.engine.tracing import capture
from penstock.planning.plans import Plan

_ROUNDS = 3


@dataclass(frozen=True)
class Spread:
    """How to spread a model that another library's loop trains.

    The model is captured (``penstock.capture``) when the first batch comes, unless it has a spine.
    Without a ``plan`` it is then measured for a moment, and planned.

    Args:
        plan: made for the same model, captured with the same ``granularity``.
        microbatches: into how many a batch is cut: as the ``plan`` says, or else 4.
        stages: how many; by default the best number.
        schedule: the family; by default the best of all that flush.
        cluster: devices to use; by default this machine's cores.
        devices: where ranks compute, as for ``penstock.Pipeline``.
        granularity: of layers, as for ``penstock.capture``.
        dynamic: which sizes of the inputs may differ from batch to batch, as for
            ``penstock.capture``: batches that are padded to their longest row need ``"all"``, and
            models that cannot be traced so, ``"rows"``.

    Raises:
        InputError: a plan that is none, or no microbatch.
    """

    plan: Plan | None = None
    microbatches: int = 4
    stages: int | None = None
    schedule: str | None = None
    cluster: Cluster | None = None
    devices: Devices | None = None
    granularity: Granularity = "block"
    dynamic: Dynamic = "all"

    def __post_init__(self) -> None:
        if self.plan is not None:
            expect(self.plan, Plan, "the plan", "make one with penstock.plan, or Plan.load a file")
            check_plan(self.plan)
            object.__setattr__(self, "microbatches", self.plan.num_microbatches)
        whole("microbatches", self.microbatches, 1)

    def layers_of(self, model: nn.Module, inputs: Any) -> nn.Module:
        """The model itself if it has a spine; otherwise captured.

        Args:
            inputs: of one microbatch.

        Raises:
            ModelError: it cannot be traced.
        """
        chained = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        if chained or hasattr(model, "spine"):
            return model
        return capture(model, inputs, granularity=self.granularity, dynamic=self.dynamic)

    def plan_for(self, layers: nn.Module, inputs: Any, targets: Any, loss: Loss) -> Plan:
        """The plan, or one that is made now.

        Args:
            layers: what ``layers_of`` gave.
            inputs, targets: of one microbatch; targets may be ``None``.
            loss: of that.

        Raises:
            PlanError: there is none.
            InputError: the best one has what another library's loop cannot train.
        """
        if self.plan is not None:
            return self.plan
        from penstock.planning.planner import plan as find
        from penstock.training.profiler import profile

        judged = {} if targets is None else {"loss": loss, "targets": targets}
        graph = profile(layers, inputs, **judged, repeats=_ROUNDS, ranks=0)
        plan = find(
            graph,
            self.cluster,
            microbatches=self.microbatches,
            stages=self.stages,
            schedule=self.schedule,
            spill="never",
        )
        check_plan(plan)
        return plan


def check_plan(plan: Plan) -> None:
    """See that gradients of a plan can lie in the model's own parameters.

    Raises:
        InputError: they cannot; it says what to do.
    """
    if plan.versions.asynchronous:
        raise InputError(
            f"{plan.schedule} never flushes, so there are no gradients of one batch that another "
            "library's optimizer could apply; take a schedule that flushes, as 1f1b, or train with "
            "penstock.Pipeline"
        )
    if plan.spill is not None:
        raise InputError(
            "the plan's stages leave memory with their gradients, which another library's "
            "optimizer would not find; plan with spill='never', or train with penstock.Pipeline"
        )
    if plan.num_tensor_ranks > 1:
        raise InputError(
            "the plan cuts weights into parts, which another library's optimizer would not find; "
            "plan with tensor_ranks=1, or train with penstock.Pipeline"
        )


def check_one_process(name: str) -> None:
    """See that all ranks will be threads of this process.

    Raises:
        InputError: it is one of several.
    """
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    processes = max(processes, int(os.environ.get("WORLD_SIZE", "1")))
    if processes > 1:
        raise InputError(
            f"{name} has its ranks as threads of one process, and this is one of {processes}; "
            "start it with plain python, or train with penstock.Pipeline under torchrun"
        )


def need(libraries: Sequence[str], extra: str, user: str) -> None:
    """See that libraries can be imported, and that nothing else is said if they cannot.

    Args:
        libraries: as they are imported.
        extra: of Penstock, which brings them.
        user: what needs them, for the error.

    Raises:
        InputError: one is not installed.
    """
    for library in libraries:
        try:
            importlib.import_module(library)
        except ModuleNotFoundError as error:
            if error.name != library:  # it is there, and lacks something itself
                raise
            raise InputError(
                f"{user} needs {library}, which is not installed; pip install 'penstock[{extra}]'"
            ) from None
