"""Context parallelism: the members of a group share a microbatch's sequence.

Every member has all parameters and some of the positions. ``zigzag`` says which, so that causal
attention is as much work for each; ``ring`` is attention over positions that members share;
``values`` has what else graphs call for it. Rules of operations are those of ``following``;
``leaves`` says of a module whether it treats positions alike, ``masks`` whether a mask is the
causal one. ``writing`` follows the positions through all layers of a captured model and writes
these anew; ``sharing`` makes a member's layers of them.

Decisions:

Positions are followed through recorded operations, not looked for in modules: a model is divided
where it first computes with its inputs and parameters, and from there on each operation either is
known to treat positions alike, or attends, or sums up a loss, or is refused by name. So nothing is
assumed of a model's code; what is divided first only decides whether it can be divided at all.

Values that every member computes whole (tables of positions, masks, labels) stay whole until they
meet what is divided; then each member takes its positions of them. That gives rotations and tables
of positions the right numbers, and each member a term of the gradient of what they were made of.

All gradients of parameters are terms of a sum, which the group makes once per minibatch, as for
layers that tensor ranks divide by rows. Parameters that reach the output without passing through
positions would count once per member, so they are refused.

Keys and values go round; every member keeps its queries. They leave for the next member before
this one computes with them.
"""

from penstock.engine.context.outputs import output_positions
from penstock.engine.context.sharing import CONTEXT, ContextSharing, context_sharings

__all__ = ["CONTEXT", "ContextSharing", "context_sharings", "output_positions"]
