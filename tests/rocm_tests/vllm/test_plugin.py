# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the connector leans on is there, and is missed where it is not; registration, layout, metrics."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest

from flashinfer.core.errors import BackendUnavailableError
from flashinfer.integrations.vllm.nixl import internals


class Worker:
    """A stock worker as far as its signatures go."""


def _method(parameters: tuple[str, ...]) -> Any:
    scope: dict[str, Any] = {}
    exec(f"def method(self, {', '.join(parameters)}): pass", scope)
    return scope["method"]


def worker(**changes: tuple[str, ...] | None) -> type:
    methods = {**internals.METHODS, **changes}
    members = {name: _method(parameters) for name, parameters in methods.items() if parameters is not None}
    return type("Worker", (), members)


def records(**gone: str) -> list[type]:
    """Dataclasses with the fields that are leaned on, but for one each of those that are named."""
    return [
        dataclasses.make_dataclass(name, [field for field in fields if field != gone.get(name)])
        for name, fields in internals.FIELDS.items()
    ]


def topology(**changes: tuple[str, ...] | None) -> type:
    methods = {**internals.TOPOLOGY_METHODS, **changes}
    return type("Topology", (), {name: _method(takes) for name, takes in methods.items() if takes is not None})


def test_a_release_that_fits_is_taken() -> None:
    internals.check_release("0.33.0", worker(), topology(), records())
    internals.check_release("0.33.2+rocm", worker(), topology(), records())


def test_all_that_moved_is_listed() -> None:
    other = worker(shutdown=None, add_remote_agent=("metadata",))
    ranks = topology(get_engine_info=None, block_size_ratio=("remote_engine_id",))
    fewer = records(NixlAgentMetadata="region_names", ReadSpec="local_block_ids", TPMapping="all_source_ranks")
    with pytest.raises(BackendUnavailableError) as caught:
        internals.check_release("0.34.0", other, ranks, fewer)
    for sentence in (
        "vllm is 0.34.0, tested with 0.33",
        "Worker.shutdown is gone",
        "Worker.add_remote_agent takes ('metadata',), not ('nixl_agent_meta',",
        "Topology.get_engine_info is gone",
        "Topology.block_size_ratio takes ('remote_engine_id',), not ('remote_block_size',)",
        "NixlAgentMetadata.region_names is gone",
        "ReadSpec.local_block_ids is gone",
        "TPMapping.all_source_ranks is gone",
        "use vLLM 0.33.x, or vLLM's own connector",
    ):
        assert sentence in str(caught.value)


def test_state_and_regions_are_checked() -> None:
    state = types.SimpleNamespace(**dict.fromkeys(internals.STATE, ()))
    internals.check_state(state)
    del state.xfer_stats
    with pytest.raises(BackendUnavailableError, match="xfer_stats is gone"):
        internals.check_state(state)
    state.region_names = ("a",)
    with pytest.raises(BackendUnavailableError, match="lists of regions have unlike lengths"):
        internals.check_regions(state, [])


@pytest.mark.vllm
def test_this_vllm_fits(engines: Any) -> None:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    from flashinfer.integrations.vllm.nixl.page_mixin import RECORDS

    assert [record.__name__ for record in RECORDS] == list(internals.FIELDS)
    internals.check_release(vllm.__version__, NixlBaseConnectorWorker, TransferTopology, RECORDS)


@pytest.mark.vllm
def test_backends_of_vllm_write_what_the_table_says(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from flashinfer.integrations.vllm.nixl.local_pages import WRITTEN_BY, kind_of

    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=engines.DTYPE)
    for (name, slots), kind in WRITTEN_BY.items():
        module, _, class_name = name.rpartition(".")
        if "aiter" in module and "rocm_aiter_fa" not in module:
            continue  # imports AITER itself
        monkeypatch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda slots=slots: slots == 2)
        backend = getattr(importlib.import_module(module), class_name)
        customized = backend.customize_spec(spec)
        assert customized.num_head_slots == slots, name
        assert kind_of(backend, customized, None) == kind


@pytest.mark.vllm
def test_registration_is_idempotent(engines: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from flashinfer.integrations.vllm import register
    from flashinfer.integrations.vllm.nixl import NixlConnector, NixlPushConnector

    register()
    register()
    assert KVConnectorFactory._registry["FlashInferNixlConnector"]() is NixlConnector
    assert KVConnectorFactory._registry["FlashInferNixlPushConnector"]() is NixlPushConnector


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("shuffle", "backend", "stated", "layout"),
    [
        ("", None, None, "WHOLE"),
        ("1", None, None, None),
        ("1", "ROCM_AITER_FA", None, None),
        ("1", "TRITON_ATTN", None, "WHOLE"),
        ("1", None, "standard", "WHOLE"),
        ("", "TRITON_ATTN", "shuffled", None),
    ],
)
def test_who_chooses_the_layout(
    engines: Any, monkeypatch: pytest.MonkeyPatch, shuffle: str, backend: str | None, stated: str | None, layout: Any
) -> None:
    from flashinfer.integrations.vllm.nixl import NixlConnector

    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", shuffle)
    chosen = None if backend is None else types.SimpleNamespace(name=backend)
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(use_mla=False),
        attention_config=types.SimpleNamespace(backend=chosen),
        kv_transfer_config=types.SimpleNamespace(get_from_extra_config=lambda key, default: stated or default),
    )
    expected = None if layout is None else getattr(engines, layout)
    assert NixlConnector.get_required_kvcache_layout(config) == expected


@pytest.mark.vllm
def test_counters_reach_prometheus(engines: Any) -> None:
    import prometheus_client
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import Counter, Gauge, Histogram

    from flashinfer.integrations.vllm.nixl import NixlConnector

    stats = NixlConnector.build_kv_connector_stats()
    assert stats.is_empty()
    stats.record_conversion(pages=3, page_bytes=300, seconds=0.002)
    stats.record_failed_conversion()
    stats.record_refused_peer("no_tag")
    stats.record_staged(5)
    stats.record_not_staged(7)
    # As it travels between processes, and from one worker of several.
    other = NixlConnector.build_kv_connector_stats(data=stats.to_dict())
    total = NixlConnector.build_kv_connector_stats().aggregate(other).aggregate(other)
    assert total.reduce()["Pages converted"] == 6
    assert total.reduce()["Avg conversion time (ms)"] == 2.0
    metrics = NixlConnector.build_prom_metrics(
        types.SimpleNamespace(kv_transfer_config=None),
        {kind: kind for kind in (Counter, Gauge, Histogram)},
        ["engine"],
        {0: ["0"]},
    )
    metrics.observe(total.to_dict())
    value = prometheus_client.REGISTRY.get_sample_value
    assert value("flashinfer:kv_pages_converted_total", {"engine": "0"}) == 6
    assert value("flashinfer:kv_bytes_converted_total", {"engine": "0"}) == 600
    assert value("flashinfer:kv_conversions_failed_total", {"engine": "0"}) == 2
    assert value("flashinfer:kv_conversion_seconds_count", {"engine": "0"}) == 2
    assert value("flashinfer:kv_pages_staged_total", {"engine": "0"}) == 10
    assert value("flashinfer:kv_pages_not_staged_total", {"engine": "0"}) == 14
    assert value("flashinfer:kv_peers_refused_total", {"engine": "0", "reason": "no_tag"}) == 2
