# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for an AMD architecture, as they are launched there, and says what came out as JSON.

With a folder as second argument it writes code objects there instead, of small widths, for the emulator.

A program, not a test: kernels that were declared for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashinfer.backends.triton.kernels import mla as kernels
from flashinfer.backends.triton.mla import CHUNK, Tuning, tuning

LDS_BYTES = 64 << 10
POINTERS = {
    "kv_indices": "*i32",
    "schedule": "*i32",
    "partial": "*fp32",
    "partial_lse": "*fp32",
    "lse": "*fp32",
    "scratch": "*fp32",
    "sinks": "*fp32",
    "custom_mask": "*u8",
    "fault": "*i64",
    **dict.fromkeys(("qo_indptr", "kv_indptr", "last_page_len", "mask_indptr"), "*i32"),
    **dict.fromkeys(("score_scale", "cap_into", "cap_out_of", "v_scale"), "fp32"),
}
FP8 = {"gfx942": "fp8e4b8", "gfx950": "fp8e4nv"}
# Strides that are multiples of 16 in every real cache, which is what makes 16-byte loads possible.
ALIGNED = ("ckv_page", "ckv_slot", "kpe_page", "kpe_slot", "q_nope_token", "q_nope_head", "q_pe_token", "q_pe_head")
ALIGNED += ("q_token", "q_head", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head", "out_token", "out_head")


def made(
    arch: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    tune: Any,
    aligned: Sequence[str] = ALIGNED,
) -> Any:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, POINTERS.get(n, "i32")) for n in names}
    divisible = [[["tt.divisibility", 16]], [n for n in names if signature[n].startswith("*") or n in aligned]]
    attributes = {(names.index(n),): divisible[0] for n in divisible[1]}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tune.warps, "num_stages": tune.stages}
    return triton.compile(source, target=GPUTarget("hip", arch, 64), options=options)


def compiled(
    arch: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    tune: Any,
    aligned: Sequence[str] = ALIGNED,
) -> dict[str, Any]:
    found = made(arch, kernel, types, constants, tune, aligned)
    text = found.asm["amdgcn"]

    def number(field: str) -> int:
        return int(re.findall(rf"\.{field}:\s+(\d+)", text)[0])

    return {
        "lds": found.metadata.shared,
        "scratch": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count"),
        # Scalars move to lanes of a vector register, not to memory.
        "scalar_spills": number("sgpr_spill_count"),
        "vgprs": number("vgpr_count"),
        "mfma": len(re.findall(r"\bv_mfma_", text)),
        "wide_loads": len(re.findall(r"\b(?:global|buffer)_load_dwordx4\b", text)),
        "flat": len(re.findall(r"\bflat_(?:load|store)", text)),
    }


SCALARS = {"score_scale": "fp32", "pe_scale": "fp32", "out_scale": "fp32"}


def save(arch: str, folder: Path) -> None:
    types = {**SCALARS, "q_nope": "*bf16", "q_pe": "*bf16", "out": "*bf16", "ckv": "*bf16", "kpe": "*bf16"}
    shape = {"PARTS": 1, "ROWS": 16, "DV": 64}
    tile = {"TILE": 32, "CHUNK": 64, "DR": 16, "PAGE_SIZE": 4, "CAUSAL": True, "SCALED": False}
    split = made(arch, kernels.mla_split, types, {**shape, **tile}, Tuning(0, 4, 1))
    merge = made(arch, kernels.mla_merge, {"out": "*bf16"}, {**shape, "STEP": 4}, Tuning(0, 4, 1))
    for name, found in (("split", split), ("merge", merge)):
        (folder / f"{name}.hsaco").write_bytes(found.asm["hsaco"])
        # The launch gives it; the code object does not say how much.
        (folder / f"{name}.lds").write_text(str(found.metadata.shared), encoding="ascii")


def main(arch: str) -> None:
    report = {}
    for rows in (16, 32, 64):
        tune = tuning(rows, LDS_BYTES)
        shape = {"PARTS": 2 if rows == 64 else 1, "ROWS": rows, "DV": 512}
        for kv, page_size, causal in (("bf16", 1, False), ("bf16", 16, True), (FP8[arch], 16, True)):
            types = {**SCALARS, "q_nope": "*bf16", "q_pe": "*bf16", "out": "*bf16", "ckv": f"*{kv}", "kpe": f"*{kv}"}
            constants = {
                **shape,
                "CAUSAL": causal,
                "SCALED": kv != "bf16",
                "PAGE_SIZE": page_size,
                "TILE": tune.tile,
                "CHUNK": CHUNK,
                "DR": 64,
            }
            name = f"mla_split rows {rows} {kv} page {page_size}"
            report[name] = compiled(arch, kernels.mla_split, types, constants, tune)
        merge = compiled(arch, kernels.mla_merge, {"out": "*bf16"}, {**shape, "STEP": 4}, Tuning(0, 4, 1))
        report[f"mla_merge rows {rows}"] = merge
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        save(sys.argv[1], Path(sys.argv[2]))
    else:
        main(sys.argv[1])
