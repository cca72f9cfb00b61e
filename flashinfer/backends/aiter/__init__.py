# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""AMD's AITER kernels.

`import aiter` happens inside of a call if at all: whether AITER is there, and which, says
`flashinfer.core.aiter_install` without importing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def prepare_all(device: torch.device) -> dict[str, str | None]:
    """Build and load what is compiled of AITER, or say why that cannot be had; `MissingJITCacheError` goes through."""
    from flashinfer.backends.aiter import page
    from flashinfer.core.errors import BackendUnavailableError, BuildError
    from flashinfer.jit import aiter_lib

    aiter_lib.forget()
    reason = aiter_lib.why_not_cache_module(device)
    if reason is None:
        try:
            page.prepare_device(device)
        except (BackendUnavailableError, BuildError):
            reason = aiter_lib.why_not_cache_module(device)
    return {aiter_lib.NAME: reason}
