"""Hardware that one may not have: devices, hosts and software stacks, each number with its source
or marked as unsourced.

``parts`` says what an entry has, ``reading`` finds entries. The files beside them are the
catalogue: ``devices.toml``, ``hosts.toml``, ``efficiencies.toml`` (what kernels reach, and what
software adds) and ``sources.toml``.
"""

from penstock.core.catalogue.parts import (
    UNSOURCED,
    CardSpec,
    Curve,
    Efficiency,
    Figure,
    Hardware,
    HostSpec,
    LinkSpec,
    Software,
)
from penstock.core.catalogue.reading import (
    as_toml,
    device_named,
    devices,
    host_named,
    hosts,
    load_devices,
    names_a_host,
    software,
    software_named,
    sources,
)

__all__ = [
    "UNSOURCED",
    "CardSpec",
    "Curve",
    "Efficiency",
    "Figure",
    "Hardware",
    "HostSpec",
    "LinkSpec",
    "Software",
    "as_toml",
    "device_named",
    "devices",
    "host_named",
    "hosts",
    "load_devices",
    "names_a_host",
    "software",
    "software_named",
    "sources",
]
