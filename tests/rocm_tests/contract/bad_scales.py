# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Scales and FP8 caches that the appends must refuse: changes to their samples, whose rows and caches are float32."""

from __future__ import annotations

from typing import Any

import torch

APPEND, MLA = "append_paged_kv_cache", "append_paged_mla_kv_cache"
OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def to(dtype: torch.dtype) -> Any:
    return lambda t: t.to(dtype)


def scales(op: str, caches: tuple[str, str], names: tuple[str, ...]) -> list[tuple[str, dict[str, Any], str]]:
    """What every scale owes: 1.0 where nothing is quantised, else a reciprocal that float32 can hold."""
    fp8 = {cache: to(FNUZ) for cache in caches}
    bounds = f"from {2.0**-126} to {2.0**126}"
    found: list[tuple[str, dict[str, Any], str]] = []
    for name in names:
        found += [
            (
                op,
                {name: lambda _: 0.5},
                f"{name} must be 1.0 where rows are of the cache's dtype, as they are stored as they are, got 0.5",
            ),
            (op, {**fp8, name: lambda _: 0.0}, f"{name} must be {bounds}, got 0.0"),
            (op, {**fp8, name: lambda _: -1.0}, f"{name} must be {bounds}, got -1.0"),
            (op, {**fp8, name: lambda _: 1e39}, f"{name} must be {bounds}, got 1e+39"),
            (op, {**fp8, name: lambda _: 2.0**-127}, f"{name} must be {bounds}, got {2.0**-127}"),
            (op, {**fp8, name: lambda _: float("nan")}, f"{name} must be finite, got nan"),
            (op, {name: lambda _: None}, f"{name} must be a number, got None"),
        ]
    return found


BAD_SCALES = [
    *scales(APPEND, ("k_cache", "v_cache"), ("k_scale", "v_scale")),
    *scales(MLA, ("ckv_cache", "kpe_cache"), ("kv_scale",)),
    (
        APPEND,
        {"k_cache": to(OCP)},
        "v_cache must be of k_cache's dtype torch.float8_e4m3fn, got torch.float32",
    ),
    (
        APPEND,
        {"k_cache": to(OCP), "v_cache": to(FNUZ)},
        "v_cache must be of k_cache's dtype torch.float8_e4m3fn, got torch.float8_e4m3fnuz",
    ),
    (
        MLA,
        {"kpe_cache": to(FNUZ)},
        "kpe_cache must be of ckv_cache's dtype torch.float32, got torch.float8_e4m3fnuz",
    ),
    (
        APPEND,
        {"k_cache": to(torch.float8_e5m2), "v_cache": to(torch.float8_e5m2)},
        "k_cache must be of the rows' dtype torch.float32, or FP8 (E4M3) for floats, got torch.float8_e5m2",
    ),
    (
        APPEND,
        {"append_key": to(torch.int8), "append_value": to(torch.int8), "k_cache": to(OCP), "v_cache": to(OCP)},
        "k_cache must be of the rows' dtype torch.int8, or FP8 (E4M3) for floats, got torch.float8_e4m3fn",
    ),
    (
        APPEND,
        # A vector of the cache is 16 elements, whatever the rows are.
        {"kv_layout": lambda _: "SHUFFLED", "k_cache": to(OCP), "v_cache": to(OCP)}
        | {name: lambda t: t[..., :24] for name in ("append_key", "append_value")},
        "append_key must be of head dimension divisible by 16 for shuffled pages, got 24",
    ),
]
