# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A good call of every op, by batch size, and how to spoil it: the data of the contract tests.

A new op needs an entry in SAMPLES and a few in BAD.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashinfer.core.op import OPS, Op
from flashinfer.selection import find_op
from rocm_tests.page.oracle import make_batch

find_op("append_paged_kv_cache")  # declares every op

PAGES, N, H, D = 40, 16, 2, 32
INDEX = (torch.int32, torch.int64)


@dataclasses.dataclass
class Sample:
    """Arguments by name, in the order of the schema, and the arguments whose first dimension is the batch's."""

    arguments: dict[str, Any]
    dynamic: tuple[str, ...]

    def clone(self) -> Sample:
        """The same call on memory of its own, strides and shared storage kept."""
        storages: dict[int, torch.Tensor] = {}

        def copy(t: torch.Tensor) -> torch.Tensor:
            raw = t.untyped_storage()
            if t.is_meta or not raw.nbytes():
                return t
            if raw.data_ptr() not in storages:
                storages[raw.data_ptr()] = torch.empty(0, dtype=t.dtype).set_(raw).clone()
            return storages[raw.data_ptr()].as_strided(t.shape, t.stride(), t.storage_offset())

        copies = {
            name: copy(a) if isinstance(a, torch.Tensor) else [copy(t) for t in a] if isinstance(a, list) else a
            for name, a in self.arguments.items()
        }
        return Sample(copies, self.dynamic)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(views: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Strided, unless they are empty: torch's own opcheck cannot copy empty tensors with strides."""
    return views if views[0].numel() else [v.new_empty(v.shape) for v in views]


ROWS = ("batch_indices", "positions", "kv_indices", "kv_indptr")


def append(n: int, variant: int) -> Sample:
    batch = make_batch([17 + b for b in range(n)], [2] * n, N, padding=n and 1, index_dtype=INDEX[variant % 2])
    key, value = rows(randn(batch.nnz, 3 * H, D)[:, H:].chunk(2, dim=1))
    pool = randn(PAGES, H, N, 2 * D, seed=1)
    kv_layout, k_cache, v_cache = (
        ("NHD", pool[..., :D].transpose(1, 2), randn(PAGES, N, H, D, seed=2)),
        ("HND", pool[..., :D], pool[..., D:]),
        ("SHUFFLED", randn(PAGES, H, D // 4, N, 4, seed=3), randn(PAGES, H, N // 4, D, 4, seed=4)),
    )[variant]
    metadata = batch.batch_indices, batch.positions, k_cache, v_cache, batch.kv_indices, batch.kv_indptr
    names = "append_key append_value batch_indices positions k_cache v_cache kv_indices kv_indptr kv_layout"
    arguments = dict(zip(names.split(), (key, value, *metadata, kv_layout), strict=True))
    return Sample(arguments, ("append_key", "append_value", *ROWS))


def append_mla(n: int, variant: int) -> Sample:
    batch = make_batch([17 + b for b in range(n)], [2] * n, N, padding=n and 1, index_dtype=INDEX[variant % 2])
    fused, pool = randn(batch.nnz, 96 + 8), randn(PAGES, N, 72, seed=1)
    caches = ((pool[..., :64], pool[..., 64:]), (randn(PAGES, N, 64), randn(N, PAGES, 8).transpose(0, 1)))[variant]
    names = "append_ckv append_kpe batch_indices positions ckv_cache kpe_cache kv_indices kv_indptr"
    metadata = batch.batch_indices, batch.positions, *caches, batch.kv_indices, batch.kv_indptr
    arguments = dict(zip(names.split(), (*rows((fused[:, 16:80], fused[:, 96:])), *metadata), strict=True))
    return Sample(arguments, ("append_ckv", "append_kpe", *ROWS))


def batch_positions(n: int, variant: int) -> Sample:
    dtype = INDEX[variant]
    arguments = {
        "append_indptr": torch.arange(n + 1, dtype=dtype) * 2,
        "seq_lens": torch.arange(n, dtype=dtype) + 5,
        "batch_indices": torch.full((2 * n + 3,), 7, dtype=torch.int32),
        "positions": torch.full((2 * n + 3,), 7, dtype=torch.int32),
    }
    return Sample(arguments, tuple(arguments))


def seq_lens(n: int, variant: int) -> Sample:
    dtype = INDEX[variant]
    arguments = {
        "kv_indptr": torch.arange(n + 1, dtype=dtype) * 3,
        "kv_last_page_len": torch.arange(n, dtype=dtype) + 1,
        "page_size": 16,
        "seq_lens": torch.full((n,), 7, dtype=torch.int32),
    }
    return Sample(arguments, ("kv_indptr", "kv_last_page_len", "seq_lens"))


def convert(n: int, variant: int) -> Sample:
    per_layer = variant + 1
    # Layers and planes in one buffer, with a gap after each plane.
    size = 2 * H * N * D // per_layer
    buffer = randn(PAGES, 2 * per_layer, size + 8, seed=1)
    arguments = {
        "planes": [buffer[:, i, :size] for i in range(2 * per_layer)],
        "planes_per_layer": per_layer,
        "block_ids": torch.arange(n, dtype=INDEX[variant]) * 2 + 1,
        "src": "standard",
        "dst": ("shuffled", "split_nhd")[variant],
        "num_kv_heads": H,
        "page_size": N,
        "head_dim": D,
    }
    return Sample(arguments, ("block_ids",))


def attention(n: int, variant: int) -> Sample:
    dtype = (torch.float32, torch.bfloat16)[variant]
    batch = make_batch([17 + b for b in range(n)], [2] * n, N, index_dtype=INDEX[variant])
    (q,) = rows((randn(2 * n, 3 * H, 2 * D, dtype=dtype)[..., :D],))
    pool = randn(PAGES, H, N, 2 * D, seed=1, dtype=dtype)
    kv_layout, caches = (("NHD", randn(2, PAGES, N, H, D).unbind()), ("HND", (pool[..., :D], pool[..., D:])))[variant]
    arguments = {
        "q": q,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "qo_indptr": torch.arange(n + 1, dtype=INDEX[variant]) * 2,
        "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.kv_indices,
        "kv_last_page_len": batch.last_page_len,
        "kv_layout": kv_layout,
        "causal": variant == 0,
        "sm_scale": 0.25,
        "out": torch.full_like(q, 7.0),
        "lse": torch.full(q.shape[:2], 7.0),
    }
    return Sample(arguments, ("q", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "out", "lse"))


# Op to (its sample of a batch size and a variant, the number of variants).
SAMPLES: dict[str, tuple[Callable[[int, int], Sample], int]] = {
    "append_paged_kv_cache": (append, 3),
    "append_paged_mla_kv_cache": (append_mla, 2),
    "get_batch_indices_positions": (batch_positions, 2),
    "get_seq_lens": (seq_lens, 2),
    "convert_kv_pages": (convert, 2),
    "paged_attention": (attention, 2),
}
CASES = [(name, variant) for name, (_, variants) in SAMPLES.items() for variant in range(variants)]


def sample(name: str, n: int, variant: int = 0) -> tuple[Op, Sample]:
    return OPS[name], SAMPLES[name][0](n, variant)


def written(op: Op) -> list[str]:
    return [a.name for a in op._torch_op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def tensors(argument: object) -> list[torch.Tensor]:
    return [argument] if isinstance(argument, torch.Tensor) else argument if isinstance(argument, list) else []
