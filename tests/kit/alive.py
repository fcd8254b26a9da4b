"""What memory is really alive, found out another way than by counting what is saved."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Weakly remembers every storage that operations make while it is active.

    Args:
        known: tensors whose storages do not count, although operations may return them.
    """

    def __init__(self, known):
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def num_bytes(self):
        """Of the storages that are alive now."""
        self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
        return sum(num_bytes for _, num_bytes in self._made.values())
