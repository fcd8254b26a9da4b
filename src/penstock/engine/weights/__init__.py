"""A stage's weights: in as many versions as its policy needs, and in memory when they are needed.

``store`` keeps them and says which a pass reads; ``corrections`` puts other tensors in the place of
parameters while it reads them, foresees where an optimizer is heading, and has PipeMare's two
corrections.

Weight swapping: ``residency`` loads stages from a tier and evicts them. ``tiers`` are a disk or
main memory, ``buffers`` the memory, on any device, into which groups of tensors come,
``data_paths`` how bytes get from one to the other, and ``movers`` the I/O threads and streams that
move them; ``transfers`` is what is on its way, and what checkpoints read from a tier. ``offload``
does the same for what microbatches keep between forward and backward.

Decisions:

Parameters stay the objects that they are while their values come and go; what has left is NaN, so
that nobody computes with it unnoticed. Buffers are counted, and given back at fixed points of a
rank's program, not when a transfer happens to end: what a rank holds at once follows from the order
of its ops alone, and a plan can promise it. Only steps of a rank know a residence; stages, updaters
and autograd do not.

On an accelerator the same program runs, and the host waits for nothing: a buffer that is given back
remembers the moments before which nobody may write to it, and a transfer the moment at which it is
done, so that streams wait where threads would.

A weight version is a set of leaves, not a buffer that is copied in and out: parameters that share
memory with the model's until these move on. They are put in the place of the model's parameters for
the time of a pass (dictionaries are changed, no numbers), and an update gives the model's
parameters new memory only if somebody still reads the old. One account (``versions.book``) says
which version an op reads and which must live; the simulator and the runtime both keep it, so
predicted and measured versions cannot be two opinions.

Backwards with newer weights than their forward (Latest, PipeMare, prediction) use hooks on saved
tensors: of a parameter or a view of its memory only the place is saved, and looked up when the
backward asks. What a layer computes from its weights is of forward time, so autocast is refused
there.
"""
