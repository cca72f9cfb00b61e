# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Names of FlashInfer's that engines import whether or not they call them, and that are not to be had here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def unsupported(name: str, what: str) -> Callable[..., NoReturn]:
    """A function of that name which says that it is not there.

    Parameters
    ----------
    name
        As FlashInfer calls it.
    what
        What it is that is not to be had.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: not supported, as it is {what}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = (
        f"Raise NotImplementedError: it is {what}.\n\n    Parameters\n    ----------\n"
        "    args, kwargs\n        Not looked at.\n    "
    )
    return refuse


nvfp4_quantize_append_paged_kv_cache_with_slot_mapping = unsupported(
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", "for NVFP4, a format of NVIDIA's"
)
