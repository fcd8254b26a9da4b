"""One rank as a group of members that share its layers.

A plan may give a rank several tensor ranks: threads or processes that perform the same ops, each on
its part of every layer. ``group`` is by which shards members share, and how they talk;
``layouts`` moves values between layouts, with the adjoint for gradients. ``splits`` tells how a
module can be divided, with ``attention`` for attention and transformer blocks, and ``chain`` says
in which layout each value of a model lies. ``divided_layers`` and ``attention`` have torch's own
modules with a part of the parameters; ``sharing`` makes them of a user's modules, and
``membership`` is what they know. ``first_run`` compares a layer's first run with one device. Layers
of captured models are written anew by ``recorded``, with ``recorded_writer``, what it calls and
``positions``, by the rules of ``following``; ``followed`` says which of them can run on some of the
positions. ``seen_whole`` lets a loss see outputs in parts, ``vocabulary`` logits; ``cross_entropy``
is what it then computes. ``unequal_groups`` is how groups of different sizes hand values to each
other, and sum the gradients of weights that both hold.

Decisions:

Members hold their part as ordinary ``nn.Parameter``s. Versions of weights, split backwards,
optimizers and autocast then see what they always see. DTensor in this place was tried: a block of
width 64 took 14.5 ms against 5.2, all weight gradients came in I, versions refused it.

A value and its gradient lie in the same layout, and both are complete: partial sums exist only
inside a layer. So any two layers fit together, and what passes between stages is a part that the
member of equal coordinate takes up as it is.

Collectives go over the rank's own transport. So they work between threads, through shared memory
and over process groups, have its deadlines, and wake when any rank fails; sums are made by one
owner per slice in the order of the members, with the same bits on all of them.

What a user's code does with a part cannot be read, so it is tried: the first run of a layer that is
not torch's own is compared with the whole layer on the whole value. Rules about shapes alone were
tried first; features in another order and a softmax over a part have the right shape.

A module is divided by changing the class of its copy to a subclass of its own. Names, hooks,
attributes and ``isinstance`` stay what the user's code expects.
"""
