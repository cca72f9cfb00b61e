# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What of vLLM the connector leans on, checked when an engine starts.

None of it is public. A release that moved something is refused with the list of what moved, before a page is read.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flashinfer.core.errors import BackendUnavailableError

TESTED = "0.33"

# Methods that are overridden or called, with their parameters behind `self`.
METHODS = {
    "register_kv_caches": ("kv_caches",),
    "restore_kv_caches": (),
    "unregister_kv_caches": (),
    "shutdown": (),
    "register_local_xfer_handler": ("block_size",),
    "_nixl_handshake": (
        "host",
        "port",
        "remote_tp_size",
        "expected_engine_id",
        "remote_dcp_size",
        "remote_pp_size",
        "notif_agents_only",
    ),
    "add_remote_agent": ("nixl_agent_meta", "remote_tp_rank", "remote_tp_size", "remote_dcp_size"),
    "_add_notif_only_remote_agent": ("metadata", "remote_tp_size", "remote_dcp_size"),
    "_validate_remote_agent_handshake": ("nixl_agent_meta", "remote_tp_size", "remote_dcp_size"),
    "_compute_desc_ids": (
        "block_ids",
        "dst_num_blocks",
        "block_size_ratio",
        "physical_blocks_per_logical",
        "region_num_blocks",
        "region_group_ids",
        "uses_region_group_mapping",
    ),
    "_build_fa_local": ("base_addresses", "block_size_ratio"),
    "_build_fa_remote": ("plan", "nixl_agent_meta", "block_size_ratio"),
    "_build_local_splits_from_plan": ("plan", "src_blocks_data", "num_fa_descs", "block_size_ratio"),
    "get_mapped_blocks": ("block_ids", "block_size_ratio"),
    "post_process_device_kv_on_receive": ("block_size_ratio", "block_ids_list", "convert"),
    "_pop_done_transfers": ("transfers",),
    "_cleanup_remote_engine": ("engine_id", "log_eviction"),
    "_log_failure": ("failure_type", "req_id", "msg", "error", "meta", "extra_context"),
}

# ... and those of the worker that pulls.
PULL_METHODS = {
    "_read_blocks_for_req": ("req_id", "meta"),
    "_read_blocks": (
        "read_spec",
        "dst_engine_id",
        "request_id",
        "remote_request_id",
        "local_xfer_side_handle",
        "local_dram_handle",
        "remote_xfer_side_handle",
        "expected_consumers",
        "awaiting_kvs",
    ),
}

# ... and those that are called of what knows the ranks of both sides.
TOPOLOGY_METHODS = {
    "block_size_ratio": ("remote_block_size",),
    "get_engine_info": ("remote_engine_id", "remote_pp_rank"),
    "handshake_target_ranks": ("remote_tp_size", "remote_dcp_size"),
}

# Fields that are read or replaced, by the name of their dataclass.
FIELDS = {
    "NixlAgentMetadata": (
        "engine_id",
        "agent_metadata",
        "kv_caches_base_addr",
        "block_lens",
        "block_strides",
        "kv_cache_layout",
        "block_size",
        "physical_blocks_per_logical_kv_block",
        "attn_backend_name",
        "region_num_blocks",
        "region_group_ids",
        "region_names",
        "region_mem_types",
    ),
    "NixlHandshakePayload": ("agent_metadata_bytes", "compatibility_hash"),
    "TransferTopology": ("total_num_kv_heads",),
    "EngineTransferInfo": ("remote_block_size", "remote_physical_blocks_per_logical"),
    "TPMapping": ("source_ranks_per_group", "all_source_ranks", "rank_to_attention_slot"),
    "ReadSpec": ("remote_rank", "local_block_ids", "block_ids_by_region"),
    "ReqMeta": ("local_block_ids", "local_physical_block_ids", "local_num_computed_blocks", "remote"),
    "RemoteMeta": ("block_ids", "engine_id"),
}

# One entry for each region, filled before the local descriptors are made.
REGION_LISTS = (
    "block_len_per_layer",
    "block_stride_per_layer",
    "region_group_ids",
    "region_names",
    "region_num_blocks",
    "region_mem_types",
    "_region_is_mla",
)

STATE = (
    *REGION_LISTS,
    "_recving_metadata",
    "_recving_transfers",
    "_recv_failures",
    "_layer_specs",
    "_registered_descs",
    "_remote_agents",
    "_has_mamba",
    "_has_packed_cache",
    "_is_hma_required",
    "_physical_blocks_per_logical_kv_block",
    "_uses_region_group_mapping",
    "_TRANSFER_MODE",
    "backend_name",
    "block_size",
    "compat_hash",
    "dcp_size",
    "device_id",
    "dst_region_group_ids",
    "dst_region_mem_types",
    "dst_region_num_blocks",
    "enforce_compat_hash",
    "kv_cache_layout",
    "kv_caches_base_addr",
    "kv_transfer_config",
    "nixl_backends",
    "nixl_wrapper",
    "num_blocks",
    "num_regions",
    "pcp_size",
    "pp_size",
    "src_xfer_handles_by_tp_ratio",
    "tp_mappings",
    "tp_rank",
    "transfer_topo",
    "transfer_tp_rank",
    "transfer_tp_size",
    "use_host_buffer",
    "use_mla",
    "vllm_config",
    "xfer_handshake_metadata",
    "xfer_stats",
)


def check_release(
    version: str,
    worker: type,
    topology: type,
    records: Iterable[type],
    methods: Mapping[str, tuple[str, ...]] = METHODS,
) -> None:
    """Refuse a vLLM whose classes are not those that the connector was written against.

    Parameters
    ----------
    version
        `vllm.__version__`.
    worker
        The stock worker class that is subclassed.
    topology
        vLLM's `TransferTopology`.
    records
        vLLM's dataclasses of the names in `FIELDS`.
    methods
        Methods of `worker`, with their parameters.

    Raises
    ------
    BackendUnavailableError
        With all that moved.
    """
    moved = [] if version.startswith(f"{TESTED}.") else [f"vllm is {version}, tested with {TESTED}"]
    moved += [*_moved_methods(worker, methods), *_moved_methods(topology, TOPOLOGY_METHODS)]
    for record in records:
        fields = {field.name for field in dataclasses.fields(record)}
        moved += [f"{record.__name__}.{name} is gone" for name in FIELDS[record.__name__] if name not in fields]
    _refuse(moved)


def _moved_methods(owner: type, methods: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for name, parameters in methods.items():
        method = inspect.getattr_static(owner, name, None)
        if method is None:
            yield f"{owner.__name__}.{name} is gone"
            continue
        found = tuple(inspect.signature(method).parameters)[1:]
        if found != parameters:
            yield f"{owner.__name__}.{name} takes {found}, not {parameters}"


def check_state(worker: object) -> None:
    """Refuse a stock worker without the attributes that are read and written later on."""
    _refuse([f"{type(worker).__name__}.{name} is gone" for name in STATE if not hasattr(worker, name)])


def check_regions(worker: object, addresses: list[int]) -> None:
    """Refuse region lists that do not run in parallel, as they do when the local descriptors are made."""
    lengths = {name: len(getattr(worker, name)) for name in REGION_LISTS} | {"kv_caches_base_addr": len(addresses)}
    if len(set(lengths.values())) != 1:
        _refuse([f"the lists of regions have unlike lengths: {lengths}"])


def check_halves(names: Sequence[str], pages: Sequence[int]) -> None:
    """Refuse half pages whose two regions are not neighbours, or whose layers differ in their number of pages."""
    if names[::2] != names[1::2] or len(set(pages)) != 1:
        _refuse([f"regions of half pages are {names} of {pages} pages"])


def _refuse(moved: Iterable[str]) -> None:
    sentences = "; ".join(moved)
    if sentences:
        raise BackendUnavailableError(
            f"flashinfer's NIXL connector does not fit this vLLM: {sentences}; use vLLM {TESTED}.x, or vLLM's own "
            "connector (leave out kv_connector_module_path)"
        )
