"""``Capabilities``: what other engines do with a plan and what they do not, as data, each with the
version of the package and the place where it is read.

``tests/engines`` runs the engines themselves in these versions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from penstock.base.errors import InputError
from penstock.base.values import shown

Property = Literal[
    "no flush",
    "stages that come and go",
    "activations that leave",
    "slices",
    "late gradients",
    "summation servers",
    "uneven replicas",
    "uneven shares",
    "uneven tensor groups",
    "tensor groups",
    "divided experts",
    "a V of stages",
    "several stages per rank",
    "another placement",
    "an order of its own",
    "recompute by stage",
    "recompute in some stages",
    "a last round of microbatches",
]
"""Something that a plan may have and an engine may not do (``properties.PROPERTIES``)."""

CutsBetween = Literal["layers", "children", "entries", "blocks"]
"""Between which parts of a model an engine cuts: any layers; children of the model and entries of
their lists; entries of a list that stands deeper; the blocks of a transformer, with all that comes
before them in the first stage and all behind them in the last one."""

Outcome = Literal["refused", "slower"]
"""Of a property that an engine lacks: it would train something else or not at all; or it trains the
same in another time or memory."""


class Limit(NamedTuple):
    """Something that an engine does not do.

    Attributes:
        outcome: what becomes of a plan that has the property.
        reason: in words, as the rest of a sentence that begins with the engine's name.
        source: the file of the package, or the issue, where that is read.
    """

    outcome: Outcome
    reason: str
    source: str


class Capabilities(NamedTuple):
    """What an engine does with plans.

    Attributes:
        title: its name for people.
        package, version: the distribution that was read, and that tests install.
        limits: by property, what it does not do; it does the others.
        families: the schedules that it has itself: one for stages that are each on a rank of their
            own, one for several per rank, if it has any.
        any_order: whether it performs any order of ops that it is given as CSV.
        tensor_rule: by what the degree of tensor parallelism is limited, in words.
        cuts_between: where it cuts a model.
    """

    title: str
    package: str
    version: str
    limits: dict[Property, Limit]
    families: tuple[str, ...]
    any_order: bool = False
    tensor_rule: str = ""
    cuts_between: CutsBetween = "layers"

    def runs(self, family: str) -> bool:
        """Whether the engine performs a schedule family as it is."""
        return self.any_order or family in self.families

    @property
    def has(self) -> str:
        """Its own schedules, in words."""
        return " and ".join(self.families)


_TORCH = "torch/distributed/pipelining/schedules.py"
_TITAN = "torchtitan/distributed/pipeline_parallel.py"
_MEGATRON = "megatron/core/pipeline_parallel/schedules.py"
_LAYOUT = "megatron/core/transformer/pipeline_parallel_layer_layout.py"
_AUTOMODEL = "nemo_automodel/components/distributed/pipelining/functional.py"


def _everywhere(schedule: str, mesh: str) -> dict[Property, Limit]:
    """The limits of every engine here: a step ends with a flush, a stage is on as many ranks as any
    other, and all microbatches go through them alike.

    Args:
        schedule: where steps are read.
        mesh: where degrees are.
    """
    return {
        "no flush": Limit("refused", "updates weights when the pipeline has drained", schedule),
        "stages that come and go": Limit("refused", "keeps all stages in memory", schedule),
        "activations that leave": Limit("slower", "keeps activations where they are", schedule),
        "slices": Limit("slower", "sends whole microbatches", schedule),
        "late gradients": Limit("refused", "sums the gradients of one step", schedule),
        "summation servers": Limit("slower", "sums by all-reduce or reduce-scatter", mesh),
        "uneven replicas": Limit("refused", "has one degree of data parallelism", mesh),
        "uneven shares": Limit("refused", "gives every replica as many microbatches", mesh),
        "uneven tensor groups": Limit("refused", "has one degree of tensor parallelism", mesh),
    }


def _recomputing(source: str) -> dict[Property, Limit]:
    return {
        "recompute by stage": Limit(
            "slower", "recomputes block by block, which keeps the inputs of all blocks", source
        ),
        "recompute in some stages": Limit("slower", "recomputes in all stages or in none", source),
    }


def _whole_experts(reason: str, source: str) -> dict[Property, Limit]:
    return {"divided experts": Limit("refused", reason, source)}


def _placed(reason: str, source: str) -> dict[Property, Limit]:
    return {"another placement": Limit("slower", reason, source)}


_LOOP = "places stage s of p ranks on rank s mod p"
_LOOP_OR_V = f"{_LOOP}, or along one V"
_ONE_STAGE = "gives every rank one stage"

CAPABILITIES: dict[str, Capabilities] = {
    "torch": Capabilities(
        "torch.distributed.pipelining",
        "torch",
        "2.13.0",
        _everywhere(_TORCH, "torch/distributed/pipelining/stage.py")
        | _whole_experts("runs the modules of a stage as they are", _TORCH),
        ("1f1b", "interleaved-1f1b"),
        any_order=True,
    ),
    "torchtitan": Capabilities(
        "torchtitan",
        "torchtitan",
        "0.3.0",
        _everywhere(_TITAN, "torchtitan/distributed/parallel_dims.py")
        | _placed(_LOOP_OR_V, _TITAN)
        | _recomputing("torchtitan/distributed/activation_checkpoint.py"),
        ("1f1b", "interleaved-1f1b"),
        any_order=True,
        tensor_rule="the degree divides the number of key and value heads (pytorch/torchtitan "
        "#4016)",
        cuts_between="children",
    ),
    "automodel": Capabilities(
        "NeMo AutoModel",
        "nemo-automodel",
        "0.7.0",
        _everywhere(_AUTOMODEL, "nemo_automodel/components/distributed/mesh.py")
        | _placed(_LOOP_OR_V, _AUTOMODEL)
        | _whole_experts(
            "wants settings of mixtures beside ep_size, for which plans have no word",
            "nemo_automodel/components/distributed/config.py",
        )
        | _recomputing("nemo_automodel/components/distributed/config.py"),
        ("1f1b", "interleaved-1f1b"),
        any_order=True,
        cuts_between="entries",
    ),
    "megatron": Capabilities(
        "Megatron-Core",
        "megatron-core",
        "0.16.1",
        _everywhere(_MEGATRON, "megatron/core/parallel_state.py")
        | _placed(_LOOP, _LAYOUT)
        | _recomputing("megatron/core/transformer/transformer_config.py")
        | {
            "a V of stages": Limit("slower", _LOOP, _LAYOUT),
            "an order of its own": Limit(
                "slower", "has 1F1B, and interleaved 1F1B for several stages per rank", _MEGATRON
            ),
            "a last round of microbatches": Limit(
                "refused",
                "interleaves whole rounds, in each as many microbatches as ranks",
                _MEGATRON,
            ),
        },
        ("1f1b", "interleaved-1f1b"),
        cuts_between="blocks",
    ),
    "deepspeed": Capabilities(
        "DeepSpeed",
        "deepspeed",
        "0.19.8",
        _everywhere("deepspeed/runtime/pipe/engine.py", "deepspeed/runtime/pipe/topology.py")
        | _whole_experts("divides experts of its own MoE layers only", "deepspeed/moe/layer.py")
        | {
            "tensor groups": Limit(
                "refused",
                "takes tensor parallelism of pipelines from layers that have it, as Megatron's do",
                "deepspeed/runtime/pipe/topology.py",
            ),
            "several stages per rank": Limit(
                "refused", _ONE_STAGE, "deepspeed/runtime/pipe/module.py"
            ),
            "an order of its own": Limit(
                "slower", "has 1F1B", "deepspeed/runtime/pipe/schedule.py"
            ),
        },
        ("1f1b",),
    ),
}
"""By the name that ``Plan.to`` takes."""

READ = ("torchtitan", "megatron", "automodel", "deepspeed")
"""The engines whose configs are read, too."""


def capabilities_of(engine: str) -> Capabilities:
    """What an engine does with plans.

    Raises:
        InputError: no such engine.
    """
    if not isinstance(engine, str) or engine not in CAPABILITIES:
        raise InputError(
            f"there is no hand-over to {shown(engine)}; take {', '.join(CAPABILITIES)}"
        )
    return CAPABILITIES[engine]
