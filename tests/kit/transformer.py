"""The profile of a small transformer as other engines name its modules, with cuts that no even
split would make."""

from __future__ import annotations

import penstock as pk

COSTS = {"tok_embeddings": 0.2, "norm": 0.1, "lm_head": 2.5}


def llama_names(num_blocks=6, prefix=""):
    """The modules of torchtitan's Llama; of transformers', with a prefix."""
    embedding = "embed_tokens" if prefix else "tok_embeddings"
    blocks = [f"{prefix}layers.{number}" for number in range(num_blocks)]
    return [f"{prefix}{embedding}", *blocks, f"{prefix}norm", "lm_head"]


def graph_of(names, **fields):
    """A profile in which the head takes as long as two and a half blocks."""
    layers = []
    for name in names:
        seconds = COSTS.get(name.rpartition(".")[2] if "layers" not in name else "", 1.0) * 1e-3
        layers.append(
            pk.Layer(
                name=name,
                forward_seconds=seconds,
                backward_input_seconds=seconds,
                backward_weight_seconds=seconds,
                **{
                    "output_bytes": 2000, "activation_bytes": 500_000, "weight_kept_bytes": 200_000,
                    "parameter_bytes": 1_000_000, "optimizer_bytes": 2_000_000, **fields,
                },
            )
        )  # fmt: skip
    return pk.LayerGraph(layers=tuple(layers), microbatch_size=1)


def llama_plan(schedule="1f1b", ranks=2, microbatches=4, *, names=None, **wanted):
    """A plan for it."""
    straight = schedule in {"1f1b", "gpipe", "zb-h1", "zb-h2"} and "replicas" not in wanted
    return pk.plan(
        graph_of(names or llama_names()),
        pk.Cluster.local(ranks),
        microbatches=microbatches,
        schedule=schedule,
        **({"stages": ranks} if straight else {}),
        **wanted,
    )


def layers_on(plan, rank):
    """The layers of the stages that a rank has."""
    return {layer for stage in plan.stages if stage.rank == rank for layer in stage.layers}


def modules_of(parameters, names):
    """Those of some modules whose parameters are listed."""
    return {name for name in names if any(key.startswith(f"{name}.") for key in parameters)}
