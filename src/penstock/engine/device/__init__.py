"""Devices: who computes on which, in which order, and how much memory is in use.

Decisions:

A rank's work on an accelerator is a ``queue``: one stream for compute, others for copies, events
between them. The host hands work over and waits for nothing. What happens in main memory has no
queue at all, and costs nothing. No room above this one names a kind of accelerator. Weights that
come and go have streams of their own (``weights.movers``): the queue knows nothing of them.

Tensors cross devices, and are copied, with their strides (``crossing``), since kernels are chosen
by them. What a caller gives arrives on a stream that no rank's work holds up (``Landing``).

Activations are counted where autograd saves them, by unique storage; resident memory is off by a
factor of two. Finalizers only leave a note, since they may run in any thread.

``captured_graphs`` replays what a device has been asked for once.

Freed memory stays in the process (``memory``): glibc is told not to return it between
microbatches. It is the one setting that outlives a ``Pipeline``; single-device runs and profiles
make it too, so that comparisons stay fair.
"""
