"""Plans for other engines, and plans of what their users have.

One module per engine (``torchtitan``, ``automodel``, ``megatron``, ``deepspeed``,
``torch_pipelining``) writes a plan in its words and reads its configs; none of them is imported,
nor is torch. ``capabilities`` is what engines do not do, as data; ``properties`` says where a plan
has something that not every engine does, and the nearest plan without; ``written`` puts these
together.
``modules`` and ``degrees`` are what several engines ask for, ``torch_schedules`` is the CSV that
torch reads and writes, ``described`` what a config says.

Decisions:

A plan is handed over only if it trains the same: what would be something else is refused, with the
property, the source in which the engine's limit is read, and the nearest plan. What is only slower
is changed, and the note beside it has the simulator's numbers. So what is written is always what
the engine performs, and ``HandOver.plan`` says it as a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.planning.handover.capabilities import CAPABILITIES, Capabilities
    from penstock.planning.handover.modules import module_fqns_per_model_part
    from penstock.planning.handover.torch_schedules import from_torch_csv, to_torch_csv
    from penstock.planning.handover.written import hand_over, nearest
    from penstock.planning.plans.handed_over import HandOver
else:
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.planning.handover.capabilities": ("CAPABILITIES", "Capabilities"),
            "penstock.planning.handover.modules": ("module_fqns_per_model_part",),
            "penstock.planning.handover.torch_schedules": ("from_torch_csv", "to_torch_csv"),
            "penstock.planning.handover.written": ("hand_over", "nearest"),
            "penstock.planning.plans.handed_over": ("HandOver",),
        },
    )

__all__ = [
    "CAPABILITIES",
    "Capabilities",
    "HandOver",
    "from_torch_csv",
    "hand_over",
    "module_fqns_per_model_part",
    "nearest",
    "to_torch_csv",
]
