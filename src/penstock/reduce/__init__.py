"""How the holders of the same weights come to one gradient, and all ranks to one norm.

A new way to sum starts at ``reducer``, the protocol that all ways keep to. ``sums`` is the one that
trains today: every element is summed by one owner (``owners``) in the order of one device.
``agreement`` is how all ranks learn the norm of the whole model's gradients.

Decisions:

Weights with several holders (tied across stages, or copies of a stage) are a copy per rank. Each
hands in its gradients (``REDUCE``) and owns a slice of the sum, which it adds up in the order of
the ranks and hands to all; then all make the same update. With r holders of M bytes a rank sends
2(r−1)/r · M, as in a ring, and the bits are those of a loop over the ranks, which a ring's are not.
A rank sums what it owns of all its shared weights before it waits for anyone's sum, so ranks may
come to their stages in any order.
"""
