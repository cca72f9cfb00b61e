# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The attention backend in parts: pages, metadata, one layer; and the platform without a GPU."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.kv import PageFormat
from rocm_tests.vllm.layer_case import BLOCKS, DIM, HEADS, KV_HEADS, PAGE_SIZE, POISON, cache_of, layer, step_of

pytestmark = pytest.mark.vllm


def test_a_step_of_uneven_requests() -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    step = step_of([[5, 2], [7], [3, 8, 1], []], [17, 16, 48, 0], [17, 1, 3, 0])
    assert step.kv_indptr.tolist() == [0, 2, 3, 6, 6]
    assert step.kv_indices[:6].tolist() == [5, 2, 7, 3, 8, 1]
    assert step.kv_last_page_len.tolist() == [1, 16, 16, 0]
    assert step.host_batch[0].tolist() == [0, 17, 18, 21, 21]
    assert step.batch_indices.tolist() == [0] * 17 + [1] + [2] * 3
    assert step.positions.tolist() == [*range(17), 15, 45, 46, 47]
    assert step.num_tokens == 21


@pytest.mark.parametrize("seed", range(20))
def test_page_tables(seed: int) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    from flashinfer.integrations.vllm.attention.metadata import page_table

    generator = torch.Generator().manual_seed(seed)
    requests, size = int(torch.randint(1, 6, (), generator=generator)), (1, 4, 16)[seed % 3]
    lens = torch.randint(0, 5 * size + 1, (requests,), generator=generator, dtype=torch.int32)
    table = torch.randint(0, 1000, (requests, 7), generator=generator, dtype=torch.int32)
    owned = [-(-int(n) // size) for n in lens]
    for row, count in zip(table, owned, strict=True):
        row[count:] = POISON
    kv_indptr, kv_indices, last = page_table(table, lens, size, int(lens.max()) + seed)
    ids = [int(page) for row, count in zip(table, owned, strict=True) for page in row[:count]]
    assert kv_indices[: len(ids)].tolist() == ids
    assert kv_indptr.tolist() == [sum(owned[:i]) for i in range(requests + 1)]
    assert last.tolist() == [int(n) - (count - 1) * size if count else 0 for n, count in zip(lens, owned, strict=True)]


def test_page_tables_of_nothing() -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    from flashinfer.integrations.vllm.attention.metadata import page_table

    for shape in ((0, 4), (2, 0)):
        lens = torch.zeros(shape[0], dtype=torch.int32)
        kv_indptr, kv_indices, last = page_table(torch.empty(shape, dtype=torch.int32), lens, 16, 0)
        assert (kv_indptr.tolist(), kv_indices.numel()) == ([0] * (shape[0] + 1), 0)
        assert last.tolist() == [0] * shape[0]


@pytest.mark.parametrize("layout", ["WHOLE", "PLANES"])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_pages_hold_what_their_tag_says(engines: Any, pages: str, layout: str, kv_heads: int) -> None:
    """Each byte where `PageFormat.offset` puts it: what the connector advertises is what is written."""
    from flashinfer.integrations.vllm.attention import FlashInferRocmBackend as Backend
    from flashinfer.integrations.vllm.nixl.local_pages import format_of, kind_of

    spec, cache = cache_of(engines, kv_heads, getattr(engines, layout))
    kind = kind_of(Backend, spec, None)
    assert kind == pages
    page = format_of(kind, spec, PAGE_SIZE, spec.page_size_bytes, torch.float8_e4m3fn, "auto")
    assert page == PageFormat(pages, torch.float32, kv_heads, PAGE_SIZE, DIM)
    key, value = torch.randn(2, PAGE_SIZE, kv_heads, DIM).unbind()
    query, blocks = torch.randn(PAGE_SIZE, HEADS, DIM), [4]
    output = torch.empty(PAGE_SIZE, HEADS, DIM)
    layer(kv_heads).forward(None, query, key, value, cache, step_of([blocks], [PAGE_SIZE], [PAGE_SIZE]), output)
    # vLLM's axes: slots or heads, then tokens, then what is left; a page's bytes in that order.
    stored = cache[4].contiguous().view(-1)
    for kv, rows in enumerate((key, value)):
        for head in range(kv_heads):
            for token in range(PAGE_SIZE):
                for d in range(DIM):
                    assert stored[page.offset(kv, head, token, d) // 4] == rows[token, head, d]
    untouched = [block for block in range(BLOCKS) if block != 4]
    assert cache[untouched].isnan().all()


def test_a_layer_attends_over_what_it_has_kept(engines: Any, pages: str) -> None:
    """Two requests over three steps on scattered pages, against attention over plain tensors in float64."""
    _, cache = cache_of(engines)
    attention = layer()
    tables, lengths = [[5, 2, 0], [8, 3]], [0, 0]
    kept: list[list[torch.Tensor]] = [[], []]
    for new in ([20, 16], [13, 1], [1, 1]):
        lengths = [length + count for length, count in zip(lengths, new, strict=True)]
        query = torch.randn(sum(new) + 2, HEADS, DIM)
        key, value = torch.randn(2, sum(new) + 2, KV_HEADS, DIM).unbind()
        output = torch.full_like(query, 7.0)
        assert attention.forward(None, query, key, value, cache, step_of(tables, lengths, new), output) is output
        first = 0
        for request, count in enumerate(new):
            rows = slice(first, first + count)
            kept[request].append(torch.stack((key[rows], value[rows])))
            k, v = torch.cat(kept[request], dim=1).double().repeat_interleave(HEADS // KV_HEADS, dim=2).unbind()
            scores = torch.einsum("qhd,khd->hqk", query[rows].double(), k) * DIM**-0.5
            future = torch.arange(lengths[request]) > torch.arange(lengths[request] - count, lengths[request])[:, None]
            expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
            torch.testing.assert_close(output[rows].double(), expected, rtol=1e-5, atol=1e-5)
            first += count
        assert (output[first:] == 7.0).all(), "rows that vLLM padded stay as they are"


def test_a_layer_that_shares_pages_writes_none(engines: Any, pages: str) -> None:
    _, cache = cache_of(engines)
    step = step_of([[5]], [3], [3])
    query, (key, value) = torch.randn(3, HEADS, DIM), torch.randn(2, 3, KV_HEADS, DIM).unbind()
    wanted, shared = torch.empty_like(query), torch.empty_like(query)
    layer().forward(None, query, key, value, cache, step, wanted)
    before = cache.clone()
    sharing = layer(kv_sharing_target_layer_name="first")
    sharing.forward(None, query, key + 1, value + 1, cache, step, shared)
    assert torch.equal(cache.nan_to_num(), before.nan_to_num())
    assert torch.equal(shared, wanted)
    sharing.forward(None, query, None, None, cache, step, shared)
    assert torch.equal(shared, wanted)


def test_before_there_are_pages(engines: Any, pages: str) -> None:
    output = torch.full((2, HEADS, DIM), 7.0)
    assert not layer().forward(None, output, output, output, torch.tensor([]), None, output).any()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes must be None"),
        ({"sliding_window": 0}, "sliding_window must be None or at least 1, got 0"),
        ({"sinks": torch.zeros(HEADS + 1)}, r"sinks must be None or one for each of the 6 heads, got \[7\]"),
        ({"attn_type": "encoder"}, "attn_type must be decoder"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype must be auto, or that of the model, torch.float32"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be auto"),
    ],
    ids=str,
)
def test_what_kernels_cannot_do_is_refused_when_the_model_is_made(engines: Any, option: Any, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        layer(**option)
    layer(kv_cache_dtype="float32" if "kv_cache_dtype" in option else "auto", logits_soft_cap=0.0)


def test_who_chooses_the_pages(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer.integrations.vllm.attention.pages import configured_kind

    for ours, theirs, kind in (
        ("", "", "standard"),
        ("", "1", "shuffled"),
        ("standard", "1", "standard"),
        ("Shuffled", "0", "shuffled"),
    ):
        monkeypatch.setenv("FLASHINFER_VLLM_PAGES", ours)
        monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", theirs)
        assert configured_kind() == kind
    monkeypatch.setenv("FLASHINFER_VLLM_PAGES", "swizzled")
    with pytest.raises(
        InvalidArgumentError, match="FLASHINFER_VLLM_PAGES must be standard or shuffled, got 'swizzled'"
    ):
        configured_kind()


def test_what_vllm_is_told(engines: Any, pages: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from flashinfer.integrations.vllm import register
    from flashinfer.integrations.vllm.attention import FlashInferRocmBackend as Backend

    register()
    register()
    assert AttentionBackendEnum[Backend.get_name()].get_class() is Backend
    assert [layout.name for layout in Backend.supported_kv_cache_layouts()] == [engines.WHOLE, engines.PLANES]
    assert Backend.get_preferred_block_size(128) == PAGE_SIZE
    assert Backend.supports_block_size(32)
    assert not Backend.supports_block_size(24)
    spec, cache = cache_of(engines)
    assert spec.page_size_bytes == 2 * KV_HEADS * PAGE_SIZE * DIM * 4
    assert Backend.supports_sliding_window()
    assert Backend.supports_sink()
    # Phases are told apart on the host.
    assert not Backend.supports_device_cpu_query_lens_mismatch()
    assert not Backend.supports_non_causal()
    assert Backend.customize_spec(spec) == spec, "vLLM customises a spec more than once"
    assert tuple(cache.shape[1:]) == ((KV_HEADS, 16, 32) if pages == "standard" else (2, 16, KV_HEADS * DIM))


def test_the_platform_wants_to_be_asked_for_and_leaves_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from flashinfer.integrations.vllm import cpu

    monkeypatch.setattr(cpu, "_GPU_NODES", (str(tmp_path / "kfd"),))
    monkeypatch.delenv("FLASHINFER_VLLM_CPU", raising=False)
    assert cpu.register_platform() is None
    monkeypatch.setenv("FLASHINFER_VLLM_CPU", "1")
    assert cpu.register_platform() == "flashinfer.integrations.vllm.cpu.platform.TorchCpuPlatform"
    (tmp_path / "kfd").touch()
    assert cpu.register_platform() is None
    assert "the CPU platform is for machines without a GPU" in caplog.text


def test_ops_in_torch(engines: Any) -> None:
    from flashinfer.integrations.vllm.cpu import ops

    assert ops.register() is ops.register()
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, -1.0]])
    assert torch.ops._C.greedy_argmax(logits).tolist() == [1, 0]
    slots = torch.zeros(5, dtype=torch.int64)
    table = torch.tensor([[4, 9], [7, 1]], dtype=torch.int32)
    starts, positions = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([15, 16, 17, 3])
    torch.ops._C.compute_slot_mapping_kernel_impl(starts, positions, table, slots, 16)
    assert slots.tolist() == [4 * 16 + 15, 9 * 16, 9 * 16 + 1, 7 * 16 + 3, -1]
    # Drawn with the frequencies of softmax: 4000 draws, whose shares have a standard deviation below 0.008.
    probabilities = torch.tensor([0.5, 0.3, 0.2])
    seeds = torch.arange(4000)
    drawn = torch.ops._C.fused_gumbel_argmax(probabilities.log().expand(4000, 3).contiguous(), seeds)
    shares = torch.bincount(drawn, minlength=3) / 4000
    torch.testing.assert_close(shares, probabilities, rtol=0, atol=0.04)
    again = torch.ops._C.fused_gumbel_argmax(probabilities.log().expand(4000, 3).contiguous(), seeds)
    assert torch.equal(drawn, again), "a seed always draws the same"


def test_ranks_are_started_as_one_says(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cpu import CpuPlatform

    from flashinfer.integrations.vllm.cpu.platform import TorchCpuPlatform

    name = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", lambda config: os.environ.update({name: "spawn"}))
    parallel = types.SimpleNamespace(distributed_executor_backend="mp", world_size=2)
    for said, kept in (("fork", "fork"), (None, "spawn")):
        if said is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, said)
        TorchCpuPlatform.check_and_update_config(types.SimpleNamespace(parallel_config=parallel))
        assert os.environ[name] == kept


@pytest.mark.nixl
def test_progress_threads_sleep(engines: Any) -> None:
    """The fixture has seen to it; NIXL itself asks for no pause."""
    from vllm.distributed import nixl_utils

    bindings = sys.modules[nixl_utils.NixlWrapper.__module__].nixlBind
    config = bindings.nixlAgentConfig()
    assert config.pthrDelay == 0
    bindings.nixlAgent("sleeper", config)
    assert config.pthrDelay > 0
