# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The page format of each layer of this engine, as its attention backend writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.kv import KINDS, PageFormat

_BACKENDS = "vllm.v1.attention.backends."

# What a backend of vLLM 0.33 writes, by its class and the head slots that its spec publishes (None: one a KV head).
# By class and not by name: shuffled AITER, plain AITER and CUDA FlashAttention are all called FLASH_ATTN.
WRITTEN_BY = {
    (_BACKENDS + "flash_attn.FlashAttentionBackend", None): "standard",
    (_BACKENDS + "triton_attn.TritonAttentionBackend", None): "standard",
    (_BACKENDS + "rocm_aiter_fa.AiterFlashAttentionBackend", None): "standard",
    (_BACKENDS + "rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend", None): "standard",
    (_BACKENDS + "rocm_aiter_fa.AiterFlashAttentionBackend", 2): "shuffled",
    (_BACKENDS + "rocm_attn.RocmAttentionBackend", 2): "x_packed",
    # Its planes are tokens of heads, which is why a rank's share of one is not one run of bytes.
    (_BACKENDS + "b12x.B12xPagedAttentionBackend", 2): "split_nhd",
}

KNOB = "page_format"


@dataclasses.dataclass(frozen=True)
class LocalPages:
    """The formats of this rank's layers, and what goes into messages about them.

    Parameters
    ----------
    formats
        Layer name to format, in the order of the regions.
    backend
        Name of the attention backend.
    scales
        Layer name to the scales of K and V, of quantised layers.
    """

    formats: Mapping[str, PageFormat]
    backend: str
    scales: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    @property
    def two_slots(self) -> bool:
        """Whether K of all heads comes before V of all heads, in any layer."""
        return any(page.head_slots == 2 for page in self.formats.values())


def kind_of(backend: type, spec: Any, stated: str | None) -> str:
    """The kind of page that `backend` writes for `spec`.

    Parameters
    ----------
    backend
        The layer's attention backend. A backend of another project may say what it writes itself, with
        `kv_page_kind`: a kind, or a function of the spec that gives one.
    spec
        The layer's `AttentionSpec`.
    stated
        The knob's value, which goes first.

    Raises
    ------
    InvalidArgumentError
        If nothing says what the pages hold, or the knob contradicts the spec.
    """
    name = f"{backend.__module__}.{backend.__qualname__}"
    said = getattr(backend, "kv_page_kind", None)
    kind = stated or (said(spec) if callable(said) else said) or WRITTEN_BY.get((name, spec.num_head_slots))
    if kind not in KINDS:
        raise InvalidArgumentError(
            f'kv_connector_extra_config: "{KNOB}" must be one of {", ".join(KINDS)} for the backend {name} with '
            f"num_head_slots {spec.num_head_slots}, got {kind!r}; state what its pages hold, or use vLLM's own "
            "connector"
        )
    slots = 1 if kind == "standard" else 2
    # One KV head in one slot and two heads in two slots are different pages of equal bytes; the spec tells.
    if (spec.num_head_slots == 2) != (slots == 2):
        raise InvalidArgumentError(
            f'kv_connector_extra_config: "{KNOB}" must fit the pages of {name}, which have num_head_slots '
            f"{spec.num_head_slots}, got {kind!r}"
        )
    return kind


def format_of(kind: str, spec: Any, page_size: int, page_bytes: int, fp8: torch.dtype, cache_dtype: str) -> PageFormat:
    """The format of a layer's pages of `page_size` tokens and `page_bytes` bytes.

    Parameters
    ----------
    fp8
        The platform's flavour of e4m3: a byte of one means twice as much in the other.
    cache_dtype
        vLLM's `--kv-cache-dtype`.

    Raises
    ------
    InvalidArgumentError
        If the page holds more than K and V of one head size.
    """
    if spec.head_size != spec.head_size_v:
        raise InvalidArgumentError(f"KV pages must have one head size, got {spec.head_size} and {spec.head_size_v}")
    dtype, scales = spec.dtype, None
    if spec.dtype.itemsize == 1:
        if cache_dtype not in ("fp8", "fp8_e4m3"):
            raise InvalidArgumentError(f"KV pages must be 16-bit, fp8 or fp8_e4m3, got {cache_dtype}")
        dtype, scales = fp8, "per_tensor"
    page = PageFormat(kind, dtype, spec.num_kv_heads, page_size, spec.head_size, scales)
    if page.page_bytes != page_bytes:
        raise InvalidArgumentError(
            f"KV pages must hold K and V only, {page.page_bytes} bytes for {page.tag}, got {page_bytes} bytes; padded "
            "pages and scales inside pages are not supported"
        )
    return page


def scales_of(layer: Any, name: str) -> tuple[float, float]:
    """Scales of K and V that an attention layer's kernels use, read once its weights are loaded.

    Raises
    ------
    InvalidArgumentError
        If the layer has not one scale for K and one for V.
    """
    scales = []
    for which in ("_k_scale", "_v_scale"):
        tensor, number = getattr(layer, which, None), getattr(layer, f"{which}_float", None)
        if not isinstance(number, float) or (isinstance(tensor, torch.Tensor) and tensor.numel() != 1):
            raise InvalidArgumentError(
                f"KV pages of 8-bit floats must have one scale for K and one for V in a layer, got {which} of {name} "
                f"as {number!r}; use a checkpoint with one scale a tensor, or vLLM's own connector"
            )
        scales.append(number)
    return scales[0], scales[1]
