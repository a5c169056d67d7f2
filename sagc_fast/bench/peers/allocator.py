"""Let the C library keep freed memory, for engines that allocate and free large tensors at every token."""

from __future__ import annotations

import os
import sys

SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""No mapping of its own for a large allocation, nothing handed back below 16 GiB, huge pages for torch's tensors.
Without them half of transformers' CPU time on a virtual machine goes into page faults: generate grows its cache by a
new tensor per token, which the C library maps and unmaps each time."""


def keep_freed_memory() -> None:
    """Start this script again under SETTINGS, unless it runs under settings of somebody's choice already: the C
    library reads them when a process starts. Standard streams stay as they are."""
    if not any(name in os.environ for name in SETTINGS):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
