# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A good call of every op, by batch size, and how to spoil it: the data of the contract tests.

A new op needs an entry in SAMPLES and a few in BAD.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashinfer.core import mla_plan
from flashinfer.core.mla_plan import Shape
from flashinfer.core.op import OPS, Op
from flashinfer.selection import find_op
from rocm_tests.contract.sample import INDEX, PAGES, D, H, N, Sample, randn, rows
from rocm_tests.contract.samples_attention import ATTENTION_SAMPLES
from rocm_tests.contract.samples_gather import GATHER_SAMPLES
from rocm_tests.contract.samples_mla_context import MLA_CONTEXT_SAMPLES
from rocm_tests.page.oracle import make_batch

find_op("append_paged_kv_cache")  # declares every op

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
    # Appends to FP8 caches are tested in page/: torch's own opcheck cannot compare such tensors.
    arguments["k_scale"] = arguments["v_scale"] = 1.0
    return Sample(arguments, ("append_key", "append_value", *ROWS))


def append_mla(n: int, variant: int) -> Sample:
    batch = make_batch([17 + b for b in range(n)], [2] * n, N, padding=n and 1, index_dtype=INDEX[variant % 2])
    fused, pool = randn(batch.nnz, 96 + 8), randn(PAGES, N, 72, seed=1)
    caches = (
        (pool[..., :64], pool[..., 64:]),
        (randn(PAGES, N, 64), randn(N, PAGES, 8).transpose(0, 1)),
    )[variant]
    names = "append_ckv append_kpe batch_indices positions ckv_cache kpe_cache kv_indices kv_indptr"
    metadata = batch.batch_indices, batch.positions, *caches, batch.kv_indices, batch.kv_indptr
    arguments = dict(zip(names.split(), (*rows((fused[:, 16:80], fused[:, 96:])), *metadata), strict=True))
    arguments["kv_scale"] = 1.0
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


def layouts(dst: str) -> dict[str, Any]:
    """The whole page in `dst`; in the source, variant 1, two blocks of 8 tokens of one head each."""
    whole = dst == "shuffled"
    return {
        "src": "standard",
        "src_heads": H if whole else 1,
        "src_page_size": N if whole else N // 2,
        "dst": dst,
        "dst_heads": H,
        "dst_page_size": N,
        "head_dim": D,
        "recode": 0,
    }


def convert_planes(per_layer: int, seed: int) -> list[torch.Tensor]:
    # Layers and planes in one buffer, with a gap after each plane.
    size = 2 * H * N * D // per_layer
    buffer = randn(PAGES, 2 * per_layer, size + 8, seed=seed)
    return [buffer[:, i, :size] for i in range(2 * per_layer)]


def convert(n: int, variant: int) -> Sample:
    arguments = {
        "planes": convert_planes(variant + 1, 1),
        "planes_per_layer": variant + 1,
        "block_ids": torch.arange(n, dtype=INDEX[variant]) * 2 + 1,
        **layouts(("shuffled", "split_nhd")[variant]),
    }
    return Sample(arguments, ("block_ids",))


def convert_into(n: int, variant: int) -> Sample:
    arguments = {
        "sources": convert_planes(2 - variant, 1),
        "sources_per_layer": 2 - variant,
        "source_ids": torch.arange(n, dtype=INDEX[variant]) % 3,
        "planes": convert_planes(variant + 1, 2),
        "planes_per_layer": variant + 1,
        "block_ids": torch.arange(n, dtype=INDEX[variant]) * 2 + 1,
        **layouts(("shuffled", "split_nhd")[variant]),
    }
    return Sample(arguments, ("source_ids", "block_ids"))


def mla(n: int, variant: int) -> Sample:
    dtype = (torch.float32, torch.bfloat16)[variant]
    batch = make_batch([17 + b for b in range(n)], [2] * n, N, index_dtype=INDEX[variant])
    q_nope, q_pe = rows(randn(2 * n, 5, 64 + 16, dtype=dtype)[:, 1:4].split([64, 16], dim=-1))
    pool, shape = randn(PAGES, N, 64 + 16, seed=1, dtype=dtype), Shape(16, 6, 1)
    lens = torch.arange(n, dtype=INDEX[variant]) + 17
    indptr = torch.arange(n + 1, dtype=INDEX[variant]) * 2
    words = mla_plan.plan([indptr, batch.kv_indptr, lens], 3, N, True, [shape], lens.device).words
    arguments = {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "ckv_cache": pool[..., :64],
        "kpe_cache": pool[..., 64:],
        "qo_indptr": indptr,
        "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.kv_indices,
        "kv_len_arr": lens,
        "causal": variant == 0,
        "sm_scale": 0.25,
        "ckv_scale": 1.0,
        "kpe_scale": 1.0,
        "needs_lse": True,
        "max_q_len": 2,
        "uniform_q": True,
        "schedule": words if variant == 0 else None,
        "rows_per_item": 16 if variant == 0 else 0,
        "workers": 6 if variant == 0 else 0,
        "scratch": torch.zeros(shape.scratch_elements(64)) if variant == 0 else None,
        "out": torch.full((2 * n, 3, 64), 7.0, dtype=dtype),
        "lse": torch.full((2 * n, 3), 7.0),
    }
    by_batch = ("q_nope", "q_pe", "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "out", "lse")
    return Sample(arguments, (*by_batch, *(("schedule",) if variant == 0 else ())), ("scratch",))


# Op to (its sample of a batch size and a variant, the number of variants).
SAMPLES: dict[str, tuple[Callable[[int, int], Sample], int]] = {
    "append_paged_kv_cache": (append, 3),
    "append_paged_mla_kv_cache": (append_mla, 2),
    "get_batch_indices_positions": (batch_positions, 2),
    "get_seq_lens": (seq_lens, 2),
    "convert_kv_pages": (convert, 2),
    "convert_kv_pages_into": (convert_into, 2),
    "mla_paged_attention": (mla, 2),
    **ATTENTION_SAMPLES,
    **GATHER_SAMPLES,
    **MLA_CONTEXT_SAMPLES,
}
CASES = [(name, variant) for name, (_, variants) in SAMPLES.items() for variant in range(variants)]


def sample(name: str, n: int, variant: int = 0) -> tuple[Op, Sample]:
    return OPS[name], SAMPLES[name][0](n, variant)


def takers(name: str, call: Sample) -> list[str]:
    """Backends of this machine that take the call, best first."""
    op = OPS[name]
    return [b for b, reason in op.reasons(tuple(call.arguments.values()), "auto").items() if reason is None]


def written(op: Op) -> list[str]:
    return [a.name for a in op._torch_op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def tensors(argument: object) -> list[torch.Tensor]:
    found = argument if isinstance(argument, list) else [argument]
    return [t for t in found if isinstance(t, torch.Tensor) and not t.is_nested]
