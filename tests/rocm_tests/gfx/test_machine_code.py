# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of the kernels: registers, LDS, scratch, and how wide they access memory.

A kernel's correctness shows on any GPU; whether it is fast on an AMD GPU shows here, without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from flashinfer.jit.cache import csrc_root
from flashinfer.jit.toolchain import KNOWN_ARCHES
from flashinfer.testing.codeobject import CodeObject, accesses

pytestmark = pytest.mark.amd_toolchain

ARCHES = KNOWN_ARCHES["hip"]
SOURCES = sorted(str(path.relative_to(csrc_root())) for path in csrc_root().rglob("*.cu"))


@dataclass(frozen=True)
class Budget:
    """What a hot kernel may use. A fragment that several instantiations share holds for each of them."""

    source: str
    fragments: tuple[str, ...]
    wide_loads: int  # 16-byte loads in the code at least: all of a thread's vectors are in flight at once
    wide_stores: int  # likewise; fewer where the compiler keeps the loop over them
    narrow_loads: int  # narrower ones at most, all of them metadata: slots, block ids, pointers
    narrow_stores: int  # narrower ones at most, all of them fault reports
    vgprs: int
    lds_bytes: int = 0
    scalar_spills: int = 0  # into lanes of vector registers, which costs a few instructions before the loop
    element_stores: int = 0  # stores of less than four bytes at most: rows that share no vector with their neighbours


# 128 VGPRs are four waves on a SIMD: two workgroups of 512 threads on a CU, which 32 KiB of LDS each also allow on
# gfx942 (64 KiB to a CU). The append kernels share the slots of their rows in 4 KiB of LDS; K and V of four vectors a
# thread, or eight vectors of MLA, are in flight. Tiles of shuffled pages take 17 KiB of LDS: three workgroups to a
# gfx942 CU.
HOT = (
    Budget("kernels/page_convert.cu", ("20convert_pages_kernel",), 8, 4, 12, 8, vgprs=128, lds_bytes=32768),
    Budget("kernels/page_convert.cu", ("convert_large_pages_kernel",), 8, 4, 12, 8, vgprs=128, lds_bytes=32768),
    Budget("kernels/page.cu", ("append_kernel", "Vec16", "RowKindE0"), 8, 8, 40, 24, vgprs=96, lds_bytes=4096),
    Budget("kernels/page.cu", ("append_mla_kernel", "Vec16", "RowKindE0"), 8, 8, 40, 24, 136, 4096, scalar_spills=4),
    # Those that make FP8 hold two or four vectors of the row for one of the cache.
    *(
        Budget("kernels/page.cu", (name, "Vec16", f"RowKindE{kind}"), 8, 2, 40, 24, 128, 4096, scalar_spills=24)
        for name in ("append_kernel", "append_mla_kernel")
        for kind in (1, 2, 3)
    ),
    Budget(
        "kernels/page.cu", ("append_shuffled_kernel", "ILi1E", "RowKindE0"), 6, 5, 40, 40, 104, 17408, element_stores=16
    ),
    Budget(
        "kernels/page.cu", ("append_shuffled_kernel", "ILi2E", "RowKindE0"), 6, 5, 40, 40, 104, 17408, element_stores=8
    ),
    Budget(
        "kernels/page.cu", ("append_shuffled_kernel", "ILi4E", "RowKindE0"), 6, 5, 40, 40, 104, 17408, element_stores=0
    ),
    Budget("kernels/page.cu", ("append_shuffled_kernel", "ILi1E"), 6, 5, 40, 40, 176, 17408, element_stores=16),
    # The gathers share the sources of their rows in LDS. K and V of four rows, or eight vectors of either, in flight.
    Budget("kernels/gather.cu", ("strided", "Vec16", "GatherOutE0"), 8, 8, 24, 12, vgprs=64, lds_bytes=1536),
    Budget("kernels/gather.cu", ("strided", "Vec16", "GatherOutE1"), 8, 16, 24, 12, vgprs=80, lds_bytes=1536),
    Budget("kernels/gather.cu", ("shuffled", "ILi2", "GatherOutE0ELb0"), 16, 16, 24, 12, vgprs=64, lds_bytes=4096),
    Budget("kernels/gather.cu", ("shuffled", "ILi1", "GatherOutE1ELb0"), 16, 32, 24, 12, vgprs=80, lds_bytes=4096),
    Budget("kernels/concat_mla.cu", ("concat_mla_kernel", "Vec16"), 4, 4, 8, 0, vgprs=64),
)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("source", SOURCES)
def test_no_kernel_uses_scratch(source: str, arch: str, code_objects: Any) -> None:
    code: CodeObject = code_objects(source, arch)
    used = {k.name: (k.scratch_bytes, k.vector_spills) for k in code.kernels}
    wrong = {name: use for name, use in used.items() if any(use)}
    assert not wrong, f"(scratch bytes, spilled vector registers): {wrong}"


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("source", SOURCES)
def test_no_kernel_loses_the_address_space(source: str, arch: str, code_objects: Any, amd_toolchain: Any) -> None:
    functions = code_objects(source, arch).instructions(amd_toolchain.objdump)
    wrong = {
        name: sorted({line.split()[0] for line in lines if line.startswith("flat_")})
        for name, lines in functions.items()
        if any(line.startswith("flat_") for line in lines)
    }
    assert not wrong, "\n".join(f"{name}: {', '.join(found)}" for name, found in wrong.items())


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("budget", HOT, ids=lambda b: "-".join(b.fragments))
def test_a_hot_kernel_keeps_its_budget(budget: Budget, arch: str, code_objects: Any, amd_toolchain: Any) -> None:
    code: CodeObject = code_objects(budget.source, arch)
    functions = code.instructions(amd_toolchain.objdump)
    kernels = [k for k in code.kernels if all(f in k.name for f in budget.fragments)]
    assert kernels, f"no kernel is called so: {[k.name for k in code.kernels]}"
    for kernel in kernels:
        found = accesses(functions[kernel.name])
        by_kind = {
            (kind, wide): sum(n for a, n in found.items() if a.kind == kind and (a.width == 16) == wide)
            for kind in ("load", "store")
            for wide in (True, False)
        }
        what = f"{kernel.name}: {dict(found)}"
        assert by_kind["load", True] >= budget.wide_loads, what
        assert by_kind["store", True] >= budget.wide_stores, what
        assert by_kind["load", False] <= budget.narrow_loads, what
        assert by_kind["store", False] <= budget.narrow_stores, what
        assert all(a.width >= 4 for a in found if a.kind == "load"), f"a hot kernel loads no bytes or halves. {what}"
        assert sum(n for a, n in found.items() if a.width < 4) <= budget.element_stores, what
        assert kernel.scalar_spills <= budget.scalar_spills, (
            f"{kernel.name}: {kernel.scalar_spills} scalar registers spilled"
        )
        assert kernel.vgprs <= budget.vgprs, f"{kernel.name}: {kernel.vgprs} VGPRs"
        assert kernel.lds_bytes <= budget.lds_bytes, f"{kernel.name}: {kernel.lds_bytes} bytes of LDS"
