# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""AITER's own cache kernels, of its wheel on PyPI, compiled into our module for AMD GPUs, and what is in that module.

With TINYGRAD_SRC naming a checkout of tinygrad, its gfx942 machine code is also executed, behind our slot mapping, as
the oracle of our writers.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import flashinfer
from flashinfer.core import env
from flashinfer.jit import aiter_lib
from flashinfer.jit.toolchain import KNOWN_ARCHES
from flashinfer.testing.codeobject import CodeObject
from flashinfer.testing.emulator import Emulator
from rocm_tests.gfx.params import Fault, IndexArray, PageTable, SlotMappingParams, as_bytes
from rocm_tests.page.oracle import Batch, append_by_loop, bits, make_batch

ROOT = Path(__file__).resolve().parents[3]
ARCHES = KNOWN_ARCHES["hip"]
BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"

Array = npt.NDArray[Any]

# Ten minutes of a processor's time where nothing is built yet, all in the first test, and more on a busy machine.
pytestmark = [pytest.mark.amd_toolchain, pytest.mark.aiter_sources, pytest.mark.slow, pytest.mark.timeout(2400)]


def build(arch: str) -> subprocess.CompletedProcess[str]:
    # All at once, a compiler for each processor; one of them takes up to 0.7 GB.
    jobs = max(1, len(os.sched_getaffinity(0)) // len(ARCHES))
    command = [ROOT / "scripts" / "rocm_env", "--python", sys.executable, "python"]
    return subprocess.run(
        [*command, str(Path(__file__).with_name("build_aiter.py")), str(ROOT / ".aiter"), arch],
        env={**os.environ, "PYTHONPATH": str(ROOT), env.max_jobs.name: str(jobs)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@functools.cache
def builds() -> dict[str, subprocess.CompletedProcess[str]]:
    """A run of build_aiter.py for each architecture, all at once: minutes where nothing is built yet.

    One that failed is kept too, so that only the first test waits for it.
    """
    with ThreadPoolExecutor(len(ARCHES)) as pool:
        return dict(zip(ARCHES, pool.map(build, ARCHES), strict=True))


def report(arch: str) -> dict[str, Any]:
    done = builds()[arch]
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def device_code(path: Path) -> list[tuple[str, bytes]]:
    """Target and code object of every entry of the offload bundles in a shared object."""
    blob, found, at = path.read_bytes(), [], -1
    while (at := blob.find(BUNDLE, at + 1)) >= 0:
        (count,) = struct.unpack_from("<Q", blob, at + len(BUNDLE))
        entry = at + len(BUNDLE) + 8
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", blob, entry)
            target = blob[entry + 24 : entry + 24 + length].decode()
            entry += 24 + length
            if size:
                found.append((target, blob[at + offset : at + offset + size]))
    return found


@pytest.mark.parametrize("arch", ARCHES)
def test_it_builds_and_loads_without_importing_aiter(arch: str) -> None:
    found = report(arch)
    assert found["version"] == "0.1.7.post2.dev18"
    assert Path(found["package"]) == ROOT / ".aiter" / "aiter"
    assert found["defines"] == {"FI_AITER_TORCH": "1", "FI_AITER_STREAM": "0", "FI_AITER_CAN_THROW": "0"}
    assert found["returned"] is None
    assert not found["imported"]


@pytest.mark.parametrize("arch", ARCHES)
def test_it_holds_code_for_its_architecture_alone(arch: str) -> None:
    targets = {target for target, _ in device_code(Path(report(arch)["path"]))}
    assert targets == {f"hipv4-amdgcn-amd-amdhsa--{arch}"}


@pytest.mark.parametrize("arch", ARCHES)
def test_it_shows_one_symbol_and_needs_no_python(arch: str) -> None:
    path = Path(report(arch)["path"])
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == [aiter_lib.ENTRY]
    dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert f"Library soname: [lib{path.parent.name}.so]" in dynamic
    assert "libamdhip64.so.7" in dynamic
    assert "libpython" not in dynamic


def test_architectures_lie_side_by_side() -> None:
    paths = [Path(report(arch)["path"]) for arch in ARCHES]
    assert len({path.parent.name for path in paths}) == len(paths)
    assert [path.parent.parent.name for path in paths] == [f"hip_{arch}" for arch in ARCHES]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CodeObject]:
    """The code objects of the gfx942 module: ours with the slot mapping, and AITER's."""
    folder, found = tmp_path_factory.mktemp("code"), {}
    for i, (_, blob) in enumerate(device_code(Path(report("gfx942")["path"]))):
        (folder / f"{i}.co").write_bytes(blob)
        code = CodeObject(folder / f"{i}.co")
        if code.kernels:
            found["slots" if any("map_slots" in k.name for k in code.kernels) else "aiter"] = code
    assert set(found) == {"slots", "aiter"}
    return found


def mapped(code: CodeObject, emulator: Emulator, batch: Batch, N: int) -> Array:
    """Slots of the rows from our kernel's machine code."""
    tables = [t.numpy() for t in (batch.batch_indices, batch.positions, batch.kv_indptr, batch.kv_indices)]
    table = PageTable(*(IndexArray(t.ctypes.data, t.dtype == np.int64) for t in tables))
    table.nnz, table.batch_size = len(tables[0]), len(tables[2]) - 1
    table.num_indices, table.num_pages, table.page_size = len(tables[3]), batch.num_pages, N
    slots, fault = np.full(batch.nnz + 3, 0x5C5C, np.int64), Fault()
    params = SlotMappingParams(table, slots.ctypes.data, ctypes.addressof(fault))
    emulator.launch(
        code, code.kernel("map_slots_kernel"), (-(-batch.nnz // 256), 1, 1), (256, 1, 1), [as_bytes(params)]
    )
    assert fault.code == 0
    assert (slots[batch.nnz :] == 0x5C5C).all()
    return slots[: batch.nnz]


def wanted_slots(batch: Batch, N: int) -> list[int]:
    lists, found = batch.lists, []
    for b, position in zip(lists["batch_indices"], lists["positions"], strict=True):
        page = -1 if b < 0 else lists["kv_indices"][lists["kv_indptr"][b] + position // N]
        found.append(-1 if b < 0 else page * N + position % N)
    return found


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_the_slot_mapping(code: dict[str, CodeObject], emulator: Emulator, index_dtype: torch.dtype) -> None:
    batch = make_batch((11, 24, 0, 300), (5, 9, 0, 270), 8, padding=4, index_dtype=index_dtype)
    assert mapped(code["slots"], emulator, batch, 8).tolist() == wanted_slots(batch, 8)


# Types of a row and of a cache in a mangled name.
TYPES = {torch.bfloat16: "IDF16bDF16b", torch.float16: "IDF16_DF16_", torch.float32: "Iff"}


def launch_aiter(
    code: CodeObject,
    emulator: Emulator,
    name: tuple[str, ...],
    rows: list[torch.Tensor],
    caches: list[torch.Tensor],
    slots: Array,
    numbers: tuple[int, ...],
) -> None:
    """One workgroup of up to 512 threads a row, as AITER's host code launches both of its writers."""
    scale = np.ones(1, np.float32)
    pointers = [t.data_ptr() for t in (*rows, *caches)] + [slots.ctypes.data]
    arguments = [struct.pack("<Q", p) for p in pointers] + [struct.pack("<i", n) for n in numbers]
    arguments += [struct.pack("<Q", scale.ctypes.data)] * 2
    nnz, heads, dim = rows[0].shape
    emulator.launch(code, code.kernel(*name), (nnz, 1, 1), (min(heads * dim, 512), 1, 1), arguments)


def random_rows(nnz: int, heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(nnz)
    return [torch.randn(nnz, heads, dim, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("N", "H", "D"), [(16, 2, 64), (5, 3, 128)])
def test_aiter_writes_nhd_pages_where_the_native_kernel_does(
    code: dict[str, CodeObject], emulator: Emulator, N: int, H: int, D: int, dtype: torch.dtype
) -> None:
    batch = make_batch((2 * N + 1, N, 0, 9), (5, 1, 0, 7), N, padding=2)
    slots = mapped(code["slots"], emulator, batch, N)
    rows = random_rows(batch.nnz, H, D, dtype)
    pool = torch.full((batch.num_pages, 2, N, H, D), float("nan"), dtype=dtype)  # K and V in turn: a page stride
    caches = list(pool.unbind(1))
    looped, native = pool.clone(), pool.clone()
    append_by_loop(*rows, **batch.lists, cache=looped, kv_layout="NHD")
    numbers = (pool.stride(0), rows[0].stride(0), rows[1].stride(0), H, D, N)
    name = ("reshape_and_cache_flash_kernel", TYPES[dtype])
    launch_aiter(code["aiter"], emulator, (*name, "TypeE0E"), rows, caches, slots, numbers)
    table = batch.kv_indices, batch.kv_indptr, batch.last_page_len
    flashinfer.append_paged_kv_cache(*rows, batch.batch_indices, batch.positions, native, *table, backend="native")
    assert torch.equal(bits(pool), bits(looped))
    assert torch.equal(bits(pool), bits(native))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("N", "H", "D"), [(16, 2, 64), (32, 3, 128)])
def test_aiter_writes_shuffled_pages_where_the_native_kernel_does(
    code: dict[str, CodeObject], emulator: Emulator, N: int, H: int, D: int, dtype: torch.dtype
) -> None:
    batch = make_batch((2 * N + 1, N, 0, 9), (5, 1, 0, 7), N, padding=2)
    slots, x = mapped(code["slots"], emulator, batch, N), 16 // dtype.itemsize
    rows = random_rows(batch.nnz, H, D, dtype)
    shapes = (batch.num_pages, H, D // x, N, x), (batch.num_pages, H, N // x, D, x)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for shape in shapes]
    native = (caches[0].clone(), caches[1].clone())
    numbers = (rows[0].stride(0), rows[1].stride(0), H, D, N, x)
    name = ("24reshape_and_cache_kernel", TYPES[dtype], "TypeE0ELb1El")
    launch_aiter(code["aiter"], emulator, name, rows, caches, slots, numbers)
    table = batch.kv_indices, batch.kv_indptr, batch.last_page_len
    flashinfer.append_paged_kv_cache(
        *rows, batch.batch_indices, batch.positions, native, *table, kv_layout="SHUFFLED", backend="native"
    )
    for got, want in zip(caches, native, strict=True):
        assert not torch.equal(bits(got), bits(torch.full_like(got, float("nan"))))
        assert torch.equal(bits(got), bits(want))
