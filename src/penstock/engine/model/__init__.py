"""Models and batches as users hand them in, and what a pipeline must know of them.

``spine`` is a model as a chain of layers with skips beside it; ``tree`` walks nested values (the
only file that knows torch's private helpers for that); ``batches`` parts what loaders give into
inputs and targets; ``microbatches`` cuts a minibatch and weights its loss; ``randomness`` gives
every layer and microbatch a stream of its own; ``replay`` runs a module a second time as if it were
the first; ``optimizer_factory`` makes a user's optimizer of a stage's parameters; ``flops`` counts
what a model computes.

Decisions:

Random streams are redirected per operation, by a dispatch mode that is active only in the thread
and only around layers that draw. torch's default generator is shared by threads, and most layers
give no way to pass another. Layers that never draw are recognised when they first run and cost
nothing afterwards; if one begins to draw later, an audit of every step and of loops over ``steps``
notices and says so.
"""
