# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Appends that quantise, against the definition of the two FP8 formats in float64."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import pytest
import torch

import flashinfer
from rocm_tests.page.oracle import POOLS, append_by_loop, assert_same_memory, make_batch

BACKENDS = ("native", "reference")
OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FLAVOURS = (OCP, FNUZ)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def values_of(flavour: torch.dtype) -> npt.NDArray[np.float64]:
    """Values of the codes 0 to the largest finite one: three bits of mantissa, four of exponent, its bias."""
    bias, codes = (7, 0x7F) if flavour == OCP else (8, 0x80)
    exponent, mantissa = np.divmod(np.arange(codes), 8)
    found: npt.NDArray[np.float64] = np.where(
        exponent == 0, mantissa / 8 * 2.0 ** (1 - bias), (1 + mantissa / 8) * 2.0 ** (exponent - bias)
    )
    return found


def codes_of(rows: torch.Tensor, scale: float, flavour: torch.dtype) -> torch.Tensor:
    """The nearest code of `rows / scale` as float32 has it, the even one of two; the largest for all beyond."""
    with np.errstate(over="ignore"):
        scaled = rows.float().numpy() * (np.float32(1) / np.float32(scale))
    values = values_of(flavour)
    size = np.minimum(np.abs(scaled.astype(np.float64)), values[-1])
    above = np.searchsorted(values, size).clip(1, len(values) - 1)
    low, high = size - values[above - 1], values[above] - size
    codes = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    negative = np.signbit(scaled) & ((flavour == OCP) | (codes != 0))
    codes = np.where(np.isnan(scaled), 0x7F if flavour == OCP else 0x80, codes | negative * 0x80)
    return torch.from_numpy(codes.astype(np.uint8)).view(flavour)


def test_the_oracle_knows_the_formats() -> None:
    """Worked by hand from the formats' definitions, and torch's own table of all codes."""
    for flavour, largest in ((OCP, 448.0), (FNUZ, 240.0)):
        assert values_of(flavour)[-1] == largest == torch.finfo(flavour).max
        codes = torch.arange(len(values_of(flavour)), dtype=torch.uint8)
        assert codes.view(flavour).double().tolist() == values_of(flavour).tolist()
    given = torch.tensor([1.0, -1.0, -0.0, 1e9, 2.0**-9, 2.0**-11, 1.0625, float("nan")])
    assert codes_of(given, 1.0, OCP).view(torch.uint8).tolist() == [0x38, 0xB8, 0x80, 0x7E, 0x01, 0x00, 0x38, 0x7F]
    assert codes_of(given, 1.0, FNUZ).view(torch.uint8).tolist() == [0x40, 0xC0, 0x00, 0x7F, 0x02, 0x00, 0x40, 0x80]


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 2-byte type; for float32 those about every FP8 code and every border between two."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    edges = []
    for flavour in FLAVOURS:
        values = torch.from_numpy(values_of(flavour))
        edges += [values, (values[1:] + values[:-1]) / 2]
    middle = torch.cat(edges).float()
    around = [torch.nextafter(middle, torch.tensor(to)) for to in (-float("inf"), float("inf"))]
    found = torch.cat([middle, *around, torch.tensor([1e-42, 3e38, float("inf"), float("nan")])])
    found = torch.cat([found, -found])
    return torch.nn.functional.pad(found, (0, -len(found) % 128))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flavour", FLAVOURS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_value(dtype: torch.dtype, flavour: torch.dtype, backend: str) -> None:
    rows = all_values(dtype).view(-1, 1, 128)
    n = len(rows)
    cache = tuple(torch.zeros(1, n, 1, 128, dtype=flavour) for _ in range(2))
    zero, table = torch.zeros(n, dtype=torch.int32), (torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([n]))
    flashinfer.append_paged_kv_cache(
        rows, rows, zero, torch.arange(n), cache, *table, k_scale=1.0, v_scale=0.7, backend=backend
    )
    for plane, scale in zip(cache, (1.0, 0.7), strict=True):
        got, want = plane.view(torch.uint8).flatten(), codes_of(rows.flatten(), scale, flavour).view(torch.uint8)
        wrong = (got != want).nonzero().flatten()[:5]
        assert not len(wrong), [(rows.flatten()[i].item(), got[i].item(), want[i].item()) for i in wrong]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flavour", FLAVOURS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_every_pool(pool: str, dtype: torch.dtype, flavour: torch.dtype, backend: str) -> None:
    """Each half has its own scale, and every byte outside the rows' slots stays."""
    H, N, D = 3, 16, 48
    batch = make_batch([33, 0, 5, 16, 17], [30, 0, 5, 1, 2], N, padding=3)
    (cache, kv_layout), (twin, _) = (POOLS[pool](batch.num_pages, N, H, D, flavour, "cpu") for _ in range(2))
    generator = torch.Generator().manual_seed(D)
    fused = (torch.randn(batch.nnz, 3 * H, D, generator=generator) * 200).to(dtype)
    key, value = fused[:, H : 2 * H], fused[:, 2 * H :]
    table = batch.kv_indices, batch.kv_indptr, batch.last_page_len
    flashinfer.append_paged_kv_cache(
        key,
        value,
        batch.batch_indices,
        batch.positions,
        cache,
        *table,
        kv_layout,
        k_scale=0.3,
        v_scale=3.0,
        backend=backend,
    )
    stored = codes_of(key, 0.3, flavour), codes_of(value, 3.0, flavour)
    append_by_loop(*stored, **batch.lists, cache=twin, kv_layout=kv_layout)
    assert_same_memory(cache, twin)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flavour", FLAVOURS, ids=str)
def test_mla(flavour: torch.dtype, backend: str) -> None:
    N, widths = 8, (64, 16)
    batch = make_batch([33, 0, 5], [30, 0, 5], N, padding=2)
    pool = torch.full((batch.num_pages, N, sum(widths)), 0x55, dtype=torch.uint8)
    rows = (torch.randn(batch.nnz, sum(widths), generator=torch.Generator().manual_seed(1)) * 90).bfloat16()
    expected, codes = pool.clone(), codes_of(rows, 0.6, flavour).view(torch.uint8)
    for i, (b, position) in enumerate(zip(batch.batch_indices.tolist(), batch.positions.tolist(), strict=True)):
        if b >= 0:
            expected[int(batch.kv_indices[int(batch.kv_indptr[b]) + position // N]), position % N] = codes[i]
    halves = pool.view(flavour).split(widths, dim=2)
    flashinfer.append_paged_mla_kv_cache(
        *rows.split(widths, dim=1),
        batch.batch_indices,
        batch.positions,
        *halves,
        batch.kv_indices,
        batch.kv_indptr,
        batch.last_page_len,
        kv_scale=0.6,
        backend=backend,
    )
    assert torch.equal(pool, expected)
