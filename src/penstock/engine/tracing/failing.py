"""The one error for a model that cannot be traced: the line of its code, and what helps."""

from __future__ import annotations

from torch import nn

from penstock.base.errors import ModelError
from penstock.engine.tracing.graphs import Given, UntraceableError, short
from penstock.engine.tracing.lines import because, lines_of
from penstock.engine.tracing.proof import run_alone
from penstock.engine.tracing.stories import PAGE, Failure, remedy_of

_SPINE = (
    f"give the model a method `spine(self)` that returns its layers in execution order (see {PAGE})"
)


def explained(model: nn.Module, given: Given, failed: UntraceableError) -> ModelError:
    """Make the error for a model that no tracer could follow; what tracers said is behind its
    ``__cause__``.

    Args:
        model: it is run on the inputs, to see whether it works at all.
        given: the inputs.
        failed: what the tracers said.
    """
    name = type(model).__name__
    own = _own_error(model, given)
    if own is not None:
        error = ModelError(
            f"{name} fails on these inputs, before anything is traced: {short(own)}"
            f"{because(lines_of(own))}. Give inputs that `model(...)` takes"
            f"{_what_it_lacks(model, given)}"
        )
        error.__cause__ = own
        return error
    lines = lines_of(failed.exported)
    remedy = remedy_of(Failure(model, failed.exported, lines))
    if remedy is None:
        error = ModelError(
            f"{name} can be traced neither by torch.export ({short(failed.exported)}) nor by "
            f"torch.fx ({short(failed.symbolic)}){because(lines)}. Change that, or {_SPINE}"
        )
    else:
        error = ModelError(f"{name} cannot be traced{because(lines)}: {remedy}. Or {_SPINE}")
        # Dozens of frames of a tracer, which say less than the line.
        failed.exported.__traceback__ = None
    failed.exported.add_note(f"torch.fx: {short(failed.symbolic)}")
    error.__cause__ = failed.exported
    return error


def _own_error(model: nn.Module, given: Given) -> Exception | None:
    """What the model raises without any tracer; ``None`` if it works."""
    try:
        run_alone(model, given)
    except Exception as error:
        return error
    return None


def _what_it_lacks(model: nn.Module, given: Given) -> str:
    _, keywords = given
    both_sides = getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True
    if both_sides and not {"labels", "decoder_input_ids", "decoder_inputs_embeds"} & {*keywords}:
        return (
            "; an encoder–decoder model takes decoder_input_ids beside input_ids, or labels, of "
            "which it makes them"
        )
    return ""
