# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused kernel of an MLA context for an AMD architecture, as compile_triton.py does the attention's.

With a folder as second argument it writes code objects there, of small widths and without FP8, for the emulator.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from compile_triton import FP8, compiled, made

from flashinfer.backends.triton.kernels import mla_context as kernels
from flashinfer.backends.triton.mla_context import MODES, tile

LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
ALIGNED = ("cache_page", "cache_slot", "weight_row", "k_token", "k_head", "v_token", "v_head")
POINTERS = {
    "kv_scale": "*fp32",
    "weight_scale": "*fp32",
    "kv_indptr": "*i32",
    "prefix": "*i32",
    "fault": "*i64",
    "k_out": "*bf16",
    "v_out": "*bf16",
}
# Heads of DeepSeek's and Kimi's, and one whose parts fill no tile.
DIMS = ({"NOPE": 128, "ROPE": 64, "DV": 128}, {"NOPE": 96, "ROPE": 24, "DV": 72})


SMALL = {"NOPE": 32, "ROPE": 16, "DV": 32, "RANK": 128, "ROPE_BLOCK": 16, "PAGE_SIZE": 4, "FLAT": False}


def save(arch: str, folder: Path) -> None:
    """The tiles that are launched."""
    for mode in ("none", "block"):
        tune = tile(LDS_BYTES[arch], mode)
        constants: dict[str, Any] = {
            **SMALL,
            "BLOCK_M": tune.tokens,
            "BLOCK_N": tune.columns,
            "BLOCK_K": tune.depth,
            "GROUP": tune.group,
            "SCALED": mode == "block",
            "WEIGHT": MODES[mode],
        }
        types = {**POINTERS, "kv_cache": "*bf16", "weight": "*bf16"}
        found = made(arch, kernels.gather_kv_b_proj, types, constants, tune, ALIGNED)
        (folder / f"{mode}.hsaco").write_bytes(found.asm["hsaco"])
        # The launch gives it; the code object does not say how much.
        (folder / f"{mode}.lds").write_text(str(found.metadata.shared), encoding="ascii")


def main(arch: str) -> None:
    report = {}
    for dims in DIMS:
        for cache, weight, mode in (
            ("bf16", "bf16", "none"),
            (FP8[arch], "bf16", "none"),
            (FP8[arch], FP8[arch], "block"),
        ):
            tune = tile(LDS_BYTES[arch], mode)
            for page_size in (1, 16):
                constants: dict[str, Any] = {
                    **dims,
                    "BLOCK_M": tune.tokens,
                    "BLOCK_N": tune.columns,
                    "BLOCK_K": tune.depth,
                    "GROUP": tune.group,
                    "RANK": 512,
                    "ROPE_BLOCK": 1 << (dims["ROPE"] - 1).bit_length(),
                    "PAGE_SIZE": page_size,
                    "FLAT": page_size == 1,
                    "SCALED": cache != "bf16",
                    "WEIGHT": MODES[mode],
                }
                types = {**POINTERS, "kv_cache": f"*{cache}", "weight": f"*{weight}"}
                name = f"nope {dims['NOPE']} cache {cache} weight {weight} {mode} page {page_size}"
                report[name] = compiled(arch, kernels.gather_kv_b_proj, types, constants, tune, ALIGNED)
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        save(sys.argv[1], Path(sys.argv[2]))
    else:
        main(sys.argv[1])
