# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Engines without a model: vLLM's real connector, scheduler and worker sides, over CPU tensors and real UCX.

Nothing of vLLM is patched. What stands in for the rest of an engine: a configuration of a tiny model, an attention
layer that only names its backend, and for the tensor-parallel group a rank and a size, so that all ranks live in one
process.
Importing this needs vLLM, so tests get it through the fixture `engines`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import socket
import tempfile
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import vllm.distributed.parallel_state as parallel_state
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)

from flashinfer.kv import PageFormat
from rocm_tests.vllm.backends import PLANES, WHOLE, OtherStandard, Shuffled, SplitByToken, Standard, Undeclared, XPacked
from rocm_tests.vllm.formats import places
from rocm_tests.vllm.transfers import announce, pull, push, until, wanted

__all__ = [
    "DTYPE",
    "LAYERS",
    "OURS",
    "PLANES",
    "POISON",
    "POISON_BYTE",
    "STOCK",
    "WHOLE",
    "Engine",
    "Fleet",
    "OtherStandard",
    "Setup",
    "Shuffled",
    "SplitByToken",
    "Standard",
    "Undeclared",
    "XPacked",
    "announce",
    "pull",
    "push",
    "until",
    "values_of",
    "wanted",
]

HEAD_DIM, PAGE_SIZE, LAYERS, DTYPE = 16, 16, 2, torch.bfloat16
OURS, STOCK = "flashinfer.integrations.vllm.nixl", None
POISON, POISON_BYTE = -21555, -85
# So that collecting engines does not walk over all that vLLM imported, which takes longer than a test.
gc.freeze()
# Below the ephemeral range, where UCX's own listeners are: vLLM waits for ever for a port that is taken.
_PORTS = iter(range(21000 + os.getpid() * 61 % 7000, 31000))


def free_port() -> int:
    for port in _PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError("no free port")


class _Layer(AttentionLayerBase):
    def __init__(self, backend: type, scales: tuple[float, float] | None) -> None:
        self.backend = backend
        if scales is not None:
            self._k_scale_float, self._v_scale_float = scales

    def get_attn_backend(self) -> type:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        return None


def _model(kv_heads: int, layers: int, head_dim: int) -> str:
    folder = Path(tempfile.gettempdir()) / f"flashinfer-test-model-{os.getuid()}-{kv_heads}-{layers}-{head_dim}"
    folder.mkdir(exist_ok=True)
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4 * kv_heads * head_dim,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4 * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return str(folder)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What decides how an engine behaves towards a peer."""

    backend: type = Standard
    role: str = "kv_consumer"
    tp: int = 1
    kv_heads: int = 4
    layout: str | None = None
    module: str | None = OURS
    connector: str = "NixlConnector"
    convert: bool | str = False
    page_format: str | None = None
    # MiB of staging memory; None leaves it to the connector.
    stage: int | None = None
    block_size: int = PAGE_SIZE
    blocks: int = 8
    enforce_hash: bool = True
    layers: int = LAYERS
    head_dim: int = HEAD_DIM
    # 8-bit floats: which of their flavours the platform has, and each layer's scales of K and V.
    fp8: torch.dtype | None = None
    scales: tuple[float, float] | None = None

    @property
    def bits(self) -> torch.dtype:
        """Integers of the size of the cache's elements."""
        return torch.int16 if self.fp8 is None else torch.int8

    @property
    def poison(self) -> int:
        return POISON if self.fp8 is None else POISON_BYTE


class Engine:
    """One engine: the scheduler's connector and one worker's connector for each rank."""

    def __init__(self, setup: Setup, engine_id: str) -> None:
        self.setup, self.id, self.port = setup, engine_id, free_port()
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.port)
        self.config = self._config()
        self.layout = self.config.cache_config.kv_cache_layout
        self.names = list(self.config.compilation_config.static_forward_context)
        self.heads = max(1, setup.kv_heads // setup.tp)
        self.workers: list[Any] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        affinity = os.sched_getaffinity(0)
        try:
            for rank in range(setup.tp):
                parallel_state._TP = types.SimpleNamespace(rank_in_group=rank, world_size=setup.tp)
                kv_config, views = self._kv_caches()
                with set_current_vllm_config(self.config):
                    connector = self._worker(kv_config)
                self.workers.append(connector)
                self.caches.append(views)
                connector.register_kv_caches(views)
            with set_current_vllm_config(self.config):
                self.scheduler = KVConnectorFactory.create_connector(self.config, KVConnectorRole.SCHEDULER, kv_config)
        finally:
            # The stock worker pins the process to one core.
            os.sched_setaffinity(0, affinity)
        said = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(said)

    def _worker(self, kv_config: KVCacheConfig) -> Any:
        if self.setup.fp8 is None:
            return KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, kv_config)
        platform = types.SimpleNamespace(fp8_dtype=lambda: self.setup.fp8)
        with mock.patch("flashinfer.integrations.vllm.nixl.page_mixin.current_platform", platform):
            return KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, kv_config)

    def _config(self) -> VllmConfig:
        setup = self.setup
        model = _model(setup.kv_heads, setup.layers, setup.head_dim)
        extra: dict[str, Any] = {"num_threads": 0, "enforce_handshake_compat": setup.enforce_hash}
        if setup.convert:
            extra["convert_kv_pages"] = setup.convert
        if setup.stage is not None:
            extra["stage_kv_pages"] = setup.stage
        if setup.page_format:
            extra["page_format"] = setup.page_format
        config = VllmConfig(
            model_config=ModelConfig(
                model=model, tokenizer=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512, seed=0
            ),
            cache_config=CacheConfig(block_size=setup.block_size, cache_dtype="auto" if setup.fp8 is None else "fp8"),
            parallel_config=ParallelConfig(tensor_parallel_size=setup.tp, distributed_executor_backend="mp"),
            scheduler_config=SchedulerConfig.default_factory(max_model_len=512, is_encoder_decoder=False),
            device_config=DeviceConfig(device="cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector=setup.connector,
                kv_role=setup.role,
                engine_id=self.id,
                kv_buffer_device="cpu",
                kv_connector_module_path=setup.module,
                kv_connector_extra_config=extra,
            ),
        )
        for layer in range(setup.layers):
            config.compilation_config.static_forward_context[f"model.layers.{layer}.attn"] = _Layer(
                setup.backend, setup.scales
            )
        layout = setup.layout
        if layout is None:
            # As the engine core asks, and so through the connector's wish.
            supported = [[known.name for known in get_supported_kv_cache_layouts([setup.backend])]]
            with set_current_vllm_config(config):
                layout = resolve_kv_cache_layout(config, supported).name
        config.cache_config.kv_cache_layout = layout
        return config

    def _kv_caches(self) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
        layout, blocks = KVCacheLayout[self.layout], self.setup.blocks
        spec = self.setup.backend.customize_spec(
            FullAttentionSpec(
                block_size=self.setup.block_size,
                num_kv_heads=self.heads,
                head_size=self.setup.head_dim,
                dtype=DTYPE if self.setup.fp8 is None else torch.uint8,
            )
        )
        page = spec.page_size_bytes
        layer_stride, block_stride = page * blocks, page
        if layout.name == PLANES:
            layer_stride, block_stride = compute_layout_strides(spec, blocks, self.setup.layers, layout)[:2]
        tensor = KVCacheTensor(
            size=page * blocks * self.setup.layers,
            layers=self.names,
            layer_stride=layer_stride,
            block_stride=block_stride,
        )
        views = create_kv_cache_views(self._storage(tensor.size), spec, blocks, layout, tensor)
        kv_config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(self.names, spec)]
        )
        kv_config.kv_cache_layout = layout.name
        return kv_config, dict(zip(self.names, views, strict=True))

    def _storage(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int8)

    @property
    def page(self) -> PageFormat:
        kind, size = self.setup.backend.kv_page_kind, self.setup.block_size
        if self.setup.fp8 is None:
            return PageFormat(kind, DTYPE, self.heads, size, self.setup.head_dim)
        return PageFormat(kind, self.setup.fp8, self.heads, size, self.setup.head_dim, "per_tensor")

    @property
    def places(self) -> torch.Tensor:
        setup = self.setup
        return places(setup.backend.kv_page_kind, self.heads, setup.block_size, setup.head_dim, setup.bits.itemsize)

    def rank_heads(self, rank: int) -> slice:
        first = rank * self.setup.kv_heads // self.setup.tp
        return slice(first, first + self.heads)

    def bits(self, rank: int, layer: int) -> torch.Tensor:
        """All pages of a layer, `[blocks, elements]`, in the order of a page's bytes whatever the layout; a copy."""
        return self.caches[rank][self.names[layer]].view(self.setup.bits).flatten(1)

    def poison(self) -> None:
        for caches in self.caches:
            for cache in caches.values():
                cache.view(self.setup.bits).fill_(self.setup.poison)

    def fill(self, values: torch.Tensor) -> None:
        """Write `values`, bits `[layers, blocks, 2, kv heads, N, D]`, as this engine's format says."""
        places = self.places.flatten()
        for rank, caches in enumerate(self.caches):
            share = values[:, :, :, self.rank_heads(rank)]
            for layer, name in enumerate(self.names):
                pages = torch.empty(values.size(1), places.numel(), dtype=self.setup.bits)
                pages[:, places] = share[layer].flatten(1)
                view = caches[name].view(self.setup.bits)
                view.copy_(pages.view(view.shape))

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """The keys and values that this engine's kernels would see, `[layers, blocks, 2, kv heads, N, D]`."""
        places = self.places
        found = torch.empty(
            self.setup.layers, len(blocks), 2, self.setup.kv_heads, *places.shape[2:], dtype=self.setup.bits
        )
        for rank in range(self.setup.tp):
            for layer in range(self.setup.layers):
                pages = self.bits(rank, layer)[list(blocks)]
                mine = pages[:, places.flatten()].view(len(blocks), *places.shape)
                found[layer, :, :, self.rank_heads(rank)] = mine
        return found

    def worker(self, rank: int = 0) -> Any:
        return self.workers[rank].connector_worker

    def step(self, rank: int, metadata: NixlConnectorMetadata | None = None) -> Any:
        """One step of a rank: what an engine does before and after a forward pass."""
        connector = self.workers[rank]
        connector.bind_connector_metadata(metadata or NixlConnectorMetadata())
        connector.start_load_kv(None)
        return connector.get_transfer_results(set())

    def close(self) -> None:
        for connector in self.workers:
            connector.shutdown()
        # Waits a second for the listener, which nobody else does.
        threading.Thread(target=self.scheduler.shutdown).start()


class Fleet:
    """The engines of one test. Their agents poll, so none outlives its test."""

    def __init__(self) -> None:
        self._engines: dict[Setup, Engine] = {}
        self._requests = iter(range(1 << 30))

    def get(self, setup: Setup) -> Engine:
        if setup not in self._engines:
            self._engines[setup] = Engine(setup, f"engine-{len(self._engines)}")
        return self._engines[setup]

    def request(self) -> str:
        return f"request-{next(self._requests)}"

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        # An agent polls until it is collected, and left to the end of the interpreter it may hang there.
        gc.collect()


def values_of(prefill: Engine, seed: int = 0) -> torch.Tensor:
    """Arbitrary keys and values for every block of an engine."""
    generator = torch.Generator().manual_seed(seed)
    setup = prefill.setup
    shape = (setup.layers, setup.blocks, 2, setup.kv_heads, setup.block_size, setup.head_dim)
    bits = torch.iinfo(prefill.setup.bits)
    return torch.randint(bits.min, bits.max + 1, shape, dtype=prefill.setup.bits, generator=generator)
