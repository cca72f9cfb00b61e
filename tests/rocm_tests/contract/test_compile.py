# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Writes keep their order and their effect under the default compiler (vllm-project/flash-attention#148)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashinfer
from flashinfer.kv import PageFormat, convert_kv_pages
from flashinfer.testing.compare import assert_equal_bits

INDEX = torch.tensor([0, 0, 1, -1], dtype=torch.int32)
POSITIONS = torch.tensor([4, 5, 0, 0], dtype=torch.int32)
TABLE = torch.tensor([3, 1, 2], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32), INDEX[:2]
# Constants of the programs: made inside they would be kernels of the compiler's own.
ONES = torch.ones(4 * 2 * 4 * 2 * 8, 1)
ROWS_INDPTR, PAGES_INDPTR, PAGE, LAST = (torch.tensor(t) for t in ([0, 3], [0, 1], [2], [3]))

STANDARD, SHUFFLED = (PageFormat(kind, "float32", 2, 4, 8) for kind in ("standard", "shuffled"))


def append(rows: torch.Tensor, cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
    flashinfer.append_paged_kv_cache(rows, rows, INDEX, POSITIONS, cache, *TABLE)


def total(pool: torch.Tensor) -> torch.Tensor:
    """Sums as a matrix product: the compiler calls a library for it and generates no C++, which takes seconds."""
    return torch.mm(pool.view(4, -1), ONES[: pool.numel()].view(-1, 4))


def read_between_two_writes(rows: torch.Tensor, more: torch.Tensor, pool: torch.Tensor) -> list[torch.Tensor]:
    first = total(pool)
    append(rows, pool)
    second = total(pool)
    append(more, pool)
    return [first, second, total(pool)]


def written_and_never_read(rows: torch.Tensor, more: torch.Tensor, pool: torch.Tensor) -> list[torch.Tensor]:
    append(rows, pool)
    return [total(more)]


def two_layers_of_one_buffer(rows: torch.Tensor, more: torch.Tensor, pool: torch.Tensor) -> list[torch.Tensor]:
    """Layers are views of the pool: K and V of layer 0, then those of layer 1."""
    for layer, layer_rows in enumerate((rows, more)):
        cache = pool[:, 0, :, layer : layer + 1], pool[:, 1, :, layer : layer + 1]
        append(layer_rows[:, layer : layer + 1], cache)
    return [total(pool)]


def adjacent_halves_of_one_pool(rows: torch.Tensor, more: torch.Tensor, pool: torch.Tensor) -> list[torch.Tensor]:
    """MLA: ckv and kpe are views of the same rows."""
    pool, rows = pool.view(4, -1, 16), rows.view(4, 16)
    halves = pool[..., :10], pool[..., 10:]
    flashinfer.append_paged_mla_kv_cache(rows[:, :10], rows[:, 10:], INDEX, POSITIONS, *halves, *TABLE)
    return [total(pool)]


def conversion_and_back(rows: torch.Tensor, more: torch.Tensor, pool: torch.Tensor) -> list[torch.Tensor]:
    """Planes travel as a list."""
    planes = [(pool[:, 0], pool[:, 1])]
    append(rows, pool)
    convert_kv_pages(planes, PAGE, STANDARD, SHUFFLED)
    between = total(pool)
    convert_kv_pages(planes, PAGE, SHUFFLED, STANDARD)
    return [between, total(pool)]


def metadata_append_and_attention(rows: torch.Tensor, more: torch.Tensor, pool: torch.Tensor) -> list[torch.Tensor]:
    lens = flashinfer.get_seq_lens(PAGES_INDPTR, LAST, 4)
    batch, positions = flashinfer.get_batch_indices_positions(ROWS_INDPTR, lens, 4)
    flashinfer.append_paged_kv_cache(rows, more, batch, positions, pool, PAGE, PAGES_INDPTR, LAST)
    results = flashinfer.paged_attention(rows[:3], pool, ROWS_INDPTR, PAGES_INDPTR, PAGE, LAST, return_lse=True)
    return [*results, lens, batch, positions]


def planned_mla() -> flashinfer.BatchMLAPagedAttentionWrapper:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    metadata = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 3]), torch.tensor([3, 1, 2]), torch.tensor([7, 2])
    wrapper.plan(*metadata, 2, 8, 8, 4, True, 0.25, torch.float32, torch.float32)
    return wrapper


MLA = planned_mla()


def planned_mla_between_two_writes(rows: torch.Tensor, more: torch.Tensor, pool: torch.Tensor) -> list[torch.Tensor]:
    """Halves of one pool; the second run sees what was written after the first."""
    pool = pool.view(4, -1, 16)[:, :4]
    halves, q = (pool[..., :8], pool[..., 8:]), rows[:3]
    pool.add_(more.view(4, 1, 16))
    first = MLA.run(q, q, *halves, return_lse=True)
    pool.mul_(2)
    out = torch.empty_like(q)
    second = MLA.run(q, q, *halves, out=out, return_lse=True, return_lse_base_on_e=True)
    return [*first, *second, out]


PROGRAMS = (
    read_between_two_writes,
    written_and_never_read,
    two_layers_of_one_buffer,
    adjacent_halves_of_one_pool,
    conversion_and_back,
    metadata_append_and_attention,
    planned_mla_between_two_writes,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_compiled_program_writes_what_the_eager_one_does(program: Callable[..., list[torch.Tensor]]) -> None:
    torch._dynamo.reset()
    pools, results = [], []
    for run in (program, torch.compile(program, fullgraph=True)):
        pool = torch.zeros(4, 2, 4, 2, 8)
        data = torch.arange(2.0 * 4 * 2 * 8).view(2, 4, 2, 8)
        results.append([t.clone() for step in (1, 100) for t in run(*(data + step), pool)])
        pools.append(pool)
    assert pools[0].count_nonzero()
    assert_equal_bits(pools[1], pools[0])
    for got, want in zip(*reversed(results), strict=True):
        assert_equal_bits(got, want)


def test_a_refusal_inside_a_compiled_program_keeps_its_sentence() -> None:
    """Shapes are refused while compiling, page ids while running."""
    compiled = torch.compile(append, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="append_paged_kv_cache: k_cache must be of shape") as caught:
        compiled(torch.ones(4, 2, 8), torch.zeros(4, 2, 4, 3, 8))
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"kv_indices\[2\] must be a page id in \[0, 2\), got 2"):
        compiled(torch.ones(4, 2, 8), torch.zeros(2, 2, 4, 2, 8))
