"""How the holders of the same weights come to one gradient, and all ranks to one norm.

A new way to sum starts at ``reducer``, the protocol that all ways keep to. ``sums`` is the one that
trains today: every element is summed by one owner (``owners``) in the order of one device.
``agreement`` is how all ranks learn the norm of the whole model's gradients.
"""
