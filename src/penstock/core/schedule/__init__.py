"""Schedules: ops, their one dependency rule, the proof that they run, passes, and families.

Decisions:

The table of needs in ``op`` is the only place that says what an op waits for. Messages and their
two ends, whom a search wakes and evaluates (``search.problem``) and the simulator's
arrays are read from it, and a test refuses any file that spells it again.

A schedule is stored as columns, one array per field; its tuples of ops are views, made when
somebody first asks for ``ranks``. ``needs`` reads the one dependency rule for all ops at once and
lets ranks go on as far as it allows, ``messages`` says what crosses ranks. Families, passes, the
check, memory and the simulator work on these. Tests hold them to the same written op by op
(``tests/oracles/op_by_op.py``).

Of very many microbatches, most of a schedule is a middle that ranks repeat (``repetition``):
planning builds it without most of that.

When a stage is in memory is said by ops, too (``residence``; of activations, ``offload``): whoever
reads a schedule sees when they come and go, and the check proves that none is missed. Both ends of
a stay follow from the rank's order; what a stay is for (``stays_of``) is read from the ops between
them.

An op may name a slice of its microbatch (``2F0.1``). Sequence slices depend on each other within a
stage, so they cannot be microbatches; as a fourth field of ``Op`` they leave torch's text as it is
for all other schedules, and every pass and metric handles them.

One microbatch on one rank is the unit of activations: ``peak_activations`` divides by the stages
that a microbatch visits there, which is all of them on a V and one of two in Chimera.

Receives stay where their op is, unless a bounded channel would then deadlock. Some orders
(breadth-first, interleaved zero bubble) send more than one message before the first is used; with
channels of one message, ``add_communication(capacity=1)`` moves exactly the receives that the
deadlock names. A capacity of 0 asks for more: where messages pass in the order of their sends, each
once its receive is posted, receives must keep that order. Updates of stages with copies come last
on their rank: between the reduction of one stage and the update of another, two ranks could wait
for each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.core.schedule.op import Kind, Op
    from penstock.core.schedule.schedule import Schedule
else:  # whoever asks for costs or names alone does not wait for numpy
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.core.schedule.op": ("Kind", "Op"),
            "penstock.core.schedule.schedule": ("Schedule",),
        },
    )

__all__ = ["Kind", "Op", "Schedule"]
