# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Counters of the connector, next to those of vLLM's own: through its statistics, its log line and Prometheus."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

CONVERTED_PAGES = "pages_converted"
CONVERTED_BYTES = "bytes_converted"
CONVERSION_SECONDS = "conversion_duration"
FAILED_CONVERSIONS = "num_failed_conversions"
REFUSED_PEERS = "peers_refused"
STAGED_PAGES = "pages_staged"
NOT_STAGED_PAGES = "pages_not_staged"
OURS = (
    CONVERTED_PAGES,
    CONVERTED_BYTES,
    CONVERSION_SECONDS,
    FAILED_CONVERSIONS,
    REFUSED_PEERS,
    STAGED_PAGES,
    NOT_STAGED_PAGES,
)

_SECONDS = [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5]


@dataclasses.dataclass
class PageStats(NixlKVConnectorStats):
    """vLLM's transfer statistics, and what became of pages whose formats differ."""

    def reset(self) -> None:
        super().reset()
        self.data.update({key: [] for key in OURS})

    def record_conversion(self, pages: int, page_bytes: int, seconds: float) -> None:
        self.data[CONVERTED_PAGES].append(pages)
        self.data[CONVERTED_BYTES].append(page_bytes)
        self.data[CONVERSION_SECONDS].append(seconds)

    def record_failed_conversion(self) -> None:
        self.data[FAILED_CONVERSIONS].append(1)

    def record_staged(self, pages: int) -> None:
        self.data[STAGED_PAGES].append(pages)

    def record_not_staged(self, pages: int) -> None:
        self.data[NOT_STAGED_PAGES].append(pages)

    def record_refused_peer(self, code: str) -> None:
        self.data[REFUSED_PEERS].append(code)

    def is_empty(self) -> bool:
        return bool(super().is_empty()) and not any(self.data.get(key) for key in OURS)

    def reduce(self) -> dict[str, int | float]:
        seconds = self.data[CONVERSION_SECONDS]
        return {
            **super().reduce(),
            "Pages converted": sum(self.data[CONVERTED_PAGES]),
            "MB converted": round(sum(self.data[CONVERTED_BYTES]) / 2**20, 3),
            "Avg conversion time (ms)": round(1e3 * sum(seconds) / len(seconds), 3) if seconds else 0,
            "Num failed conversions": len(self.data[FAILED_CONVERSIONS]),
            "Num refused peers": len(self.data[REFUSED_PEERS]),
            "Pages staged": sum(self.data[STAGED_PAGES]),
            "Pages not staged": sum(self.data[NOT_STAGED_PAGES]),
        }


class PagePromMetrics(NixlPromMetrics):
    """Prometheus metrics of `PageStats`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            CONVERTED_PAGES: ("flashinfer:kv_pages_converted", "KV pages converted after a transfer."),
            CONVERTED_BYTES: ("flashinfer:kv_bytes_converted", "Bytes of KV pages converted after a transfer."),
            FAILED_CONVERSIONS: ("flashinfer:kv_conversions_failed", "Requests whose KV pages were not converted."),
            STAGED_PAGES: ("flashinfer:kv_pages_staged", "KV pages read through staging memory."),
            NOT_STAGED_PAGES: (
                "flashinfer:kv_pages_not_staged",
                "KV pages read straight into their planes, for want of staging memory.",
            ),
        }
        self._counters = {
            key: self._per_engine(self._counter_cls(name=name, documentation=text, labelnames=labelnames))
            for key, (name, text) in counters.items()
        }
        self._seconds = self._per_engine(
            self._histogram_cls(
                name="flashinfer:kv_conversion_seconds",
                documentation="From the end of a request's transfer to the end of its conversion.",
                buckets=_SECONDS,
                labelnames=labelnames,
            )
        )
        self._refused = self._counter_cls(
            name="flashinfer:kv_peers_refused",
            documentation="Handshakes refused because of page formats, by reason.",
            labelnames=[*labelnames, "reason"],
        )

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        for key, counter in self._counters.items():
            counter[engine_idx].inc(sum(transfer_stats_data.get(key, ())))
        for seconds in transfer_stats_data.get(CONVERSION_SECONDS, ()):
            self._seconds[engine_idx].observe(seconds)
        for code in transfer_stats_data.get(REFUSED_PEERS, ()):
            self._refused.labels(*self.per_engine_labelvalues[engine_idx], code).inc()
