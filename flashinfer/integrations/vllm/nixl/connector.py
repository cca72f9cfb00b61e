# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The connectors that vLLM loads: its own, with our workers."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from flashinfer.integrations.vllm.nixl import internals
from flashinfer.integrations.vllm.nixl.layout import backend_chooses
from flashinfer.integrations.vllm.nixl.page_mixin import PageFormatMixin
from flashinfer.integrations.vllm.nixl.stats import PagePromMetrics, PageStats


class PagePullWorker(PageFormatMixin, NixlPullConnectorWorker):
    """Reads pages of a peer."""

    _STOCK = NixlPullConnectorWorker
    _LEANED_ON = internals.METHODS | internals.PULL_METHODS

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if self._refuses_second_read(req_id, meta):
            return
        self._align_pages(meta)
        super()._read_blocks_for_req(req_id, meta)

    def _read_blocks(self, *, read_spec: Any, dst_engine_id: str, request_id: str, **rest: Any) -> bool:
        call = {"read_spec": read_spec, "dst_engine_id": dst_engine_id, "request_id": request_id, **rest}
        with self._through_staging(request_id, dst_engine_id, read_spec) as replaced:
            return bool(super()._read_blocks(**call | replaced))


class PagePushWorker(PageFormatMixin, NixlPushConnectorWorker):
    """Writes pages into a peer, or is written to."""

    _STOCK = NixlPushConnectorWorker


class _PageConnector:
    """What both connectors add to vLLM's class methods."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        if vllm_config.model_config is not None and backend_chooses(vllm_config):
            return None
        layout: str | None = super().get_required_kvcache_layout(vllm_config)  # type: ignore[misc]
        return layout

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PageStats:
        return PageStats() if data is None else PageStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> PagePromMetrics:
        return PagePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class NixlPullConnector(_PageConnector, stock.NixlPullConnector):
    """Pull mode: the decoder reads."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Past the stock constructor, which would make a stock worker, and so a NIXL agent, too.
        stock.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = NixlPullConnectorScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = PagePullWorker(vllm_config, self.engine_id, kv_cache_config)


class NixlPushConnector(_PageConnector, stock.NixlPushConnector):
    """Push mode: the prefill writes."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role == KVConnectorRole.SCHEDULER:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        stock.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_worker = PagePushWorker(vllm_config, self.engine_id, kv_cache_config)


# The name that vLLM's rules for its own connector look for.
NixlConnector = NixlPullConnector
