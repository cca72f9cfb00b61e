# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the attention and merge kernels for an AMD architecture, as compile_triton.py does the MLA kernels."""

from __future__ import annotations

import json
import sys
from typing import Any

from flashinfer.backends.triton.attention_tuning import LAYOUTS, Tuning, tuning
from flashinfer.backends.triton.device import power_of_2
from flashinfer.backends.triton.kernels import attention, attention_fixed, merge
from rocm_tests.gfx.compile_triton import FP8, LDS_BYTES, compiled

# Kernel, rows, layout, K and V dimensions, FP8, and what differs from causal attention.
SHAPES: tuple[tuple[str, int, str, int, int, bool, dict[str, Any]], ...] = (
    ("split", 16, "NHD", 128, 128, False, {}),
    ("split", 16, "SHUFFLED", 128, 128, False, {}),
    ("split", 16, "SHUFFLED", 128, 128, True, {"CAUSAL": False}),
    ("split", 32, "NHD", 64, 64, False, {"SINKS": True, "WINDOW": True}),
    ("split", 64, "NHD", 128, 128, True, {}),
    ("split", 64, "NHD", 256, 256, False, {}),
    ("whole", 128, "NHD", 128, 128, False, {}),
    ("whole", 128, "SHUFFLED", 128, 128, True, {}),
    ("whole", 128, "NHD", 128, 128, False, {"CUSTOM": True, "CAUSAL": False, "SOFT_CAP": True}),
    ("whole", 128, "RAGGED", 192, 128, False, {}),
    ("whole", 128, "NHD", 256, 256, False, {}),
    ("whole", 16, "NHD", 128, 128, False, {}),
    ("fixed", 16, "NHD", 128, 128, False, {}),
    ("fixed", 16, "SHUFFLED", 128, 128, False, {}),
    ("fixed", 128, "NHD", 128, 128, False, {}),
)
KERNELS = {
    "split": attention.attention_split,
    "whole": attention.attention_whole,
    "fixed": attention_fixed.attention_fixed,
}
FLAGS = {"CAUSAL": True, "WINDOW": False, "SOFT_CAP": False, "CUSTOM": False, "SINKS": False, "NEGATE": False}


def main(arch: str) -> None:
    report = {}
    for kind, rows, layout, dim, dim_vo, fp8, flags in SHAPES:
        kv = FP8[arch] if fp8 else "bf16"
        tune = tuning(
            rows=rows,
            dim=max(dim, dim_vo),
            element_size=1 if fp8 else 2,
            layout=LAYOUTS[layout],
            custom="CUSTOM" in flags,
            shared_bytes=LDS_BYTES,
        )
        first = 1 << (dim.bit_length() - 1)
        constants = {
            **FLAGS,
            **flags,
            "WORKERS": 608,
            "BATCH": 64,
            "UNIT": 2048 if kind == "fixed" else 64,
            "PAGE_SIZE": 1 if layout == "RAGGED" else 16,
            "LAYOUT": LAYOUTS[layout],
            "X": 16 if fp8 else 8,
            "ROWS": rows,
            "TILE": tune.tile,
            "DQ": dim,
            "DQ1": first,
            "DQ2": power_of_2(dim - first) if dim > first else 0,
            "DV": dim_vo,
            "DVP": power_of_2(dim_vo),
            "VECTORS": (2 if rows < 128 else 1) if layout == "SHUFFLED" else 0,
            "STAGES": tune.stages,
        }
        types = {"q": "*bf16", "out": "*bf16", "k": f"*{kv}", "v": f"*{kv}"}
        name = " ".join((kind, str(rows), layout, str(dim), kv, *flags))
        report[name] = compiled(arch, KERNELS[kind], types, constants, tune)
    joined = {"WORKERS": 608, "ROWS": 16, "STEP": 4, "DV": 128, "DVP": 128}
    report["merge of pieces"] = compiled(arch, attention.attention_merge, {"out": "*bf16"}, joined, Tuning(0, 4, 1))
    fixed = attention_fixed.attention_fixed_merge
    report["merge of fixed pieces"] = compiled(arch, fixed, {"out": "*bf16"}, joined, Tuning(0, 4, 1))
    values = dict.fromkeys(("v", "v_a", "v_b", "out"), "*bf16")
    sums = {**dict.fromkeys(("s", "s_a", "s_b", "s_out"), "*fp32"), "mask": "*u8"}
    step = {"D": 128, "DP": 128, "STEP": 16}
    two = {**step, "MASKED": True}
    report["merge of two states"] = compiled(arch, merge.merge_two, {**values, **sums}, two, Tuning(0, 4, 1))
    report["merge of many states"] = compiled(arch, merge.merge_many, {**values, **sums}, step, Tuning(0, 4, 1))
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
