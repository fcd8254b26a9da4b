"""Registers the emulated devices with torch."""

from __future__ import annotations

import functools

import torch

from tests.kit.accelerator import device_module, recurrent

# By hand, or meaningless on a device.
_NOT_TAKEN = {"set_"}


@functools.cache
def register():
    """Makes the emulated devices this process's accelerator; gives ``torch.emu``."""
    ledger = device_module._ledger()
    torch.utils.rename_privateuse1_backend(device_module.NAME)
    torch._register_device_module(device_module.NAME, device_module)
    torch.utils.generate_methods_for_privateuse1_backend()
    of_cpu, own = (
        {
            name.removeprefix("aten::")
            for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
            if name.startswith("aten::")
        }
        for key in ("CPU", "PrivateUse1")
    )
    ledger.take_kernels(sorted(of_cpu - own - _NOT_TAKEN))
    recurrent.register()
    return device_module
