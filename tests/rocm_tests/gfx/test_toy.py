# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The inspection and the emulator, proven on kernels whose faults are known."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from flashinfer.core.errors import InvalidArgumentError, LaunchError
from flashinfer.testing.codeobject import CodeObject, accesses
from flashinfer.testing.emulator import Emulator, why_not

Words = npt.NDArray[np.uint32]


def pointer(array: Words) -> bytes:
    return struct.pack("<Q", array.ctypes.data)


def words(count: int) -> Words:
    return np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)


@pytest.fixture
def toy(code_objects: Any) -> CodeObject:
    code: CodeObject = code_objects("toy.cu", "gfx942")
    return code


@pytest.mark.amd_toolchain
def test_metadata(toy: CodeObject) -> None:
    kernel = toy.kernel("reverse_words")
    assert (kernel.lds_bytes, kernel.scratch_bytes, kernel.vector_spills, kernel.max_threads) == (1024, 0, 0, 256)
    assert [a.size for a in kernel.arguments if a.kind == "by_value"] == [24, 4]
    assert 0 < kernel.vgprs < 32
    assert kernel.waves_per_simd() == 8
    assert toy.kernel("use_scratch").scratch_bytes >= 256


@pytest.mark.amd_toolchain
def test_a_name_must_be_of_one_kernel(toy: CodeObject) -> None:
    with pytest.raises(InvalidArgumentError, match="must name one kernel, got 2"):
        toy.kernel("copy_")
    with pytest.raises(InvalidArgumentError, match="must name one kernel, got 0"):
        toy.kernel("nothing")


@pytest.mark.amd_toolchain
def test_accesses(toy: CodeObject, amd_toolchain: Any) -> None:
    functions = toy.instructions(amd_toolchain.objdump)
    assert any(line.startswith("v_perm_b32") for line in functions["reverse_words"])
    assert any(line.startswith("s_barrier") for line in functions["reverse_words"])
    assert {(a.kind, a.width, a.mnemonic) for a in accesses(functions["copy_wide"])} == {
        ("load", 16, "global_load_dwordx4"),
        ("store", 16, "global_store_dwordx4"),
    }
    assert {a.mnemonic for a in accesses(functions["copy_flat"])} == {"flat_load_dword", "flat_store_dword"}
    assert any(a.mnemonic.startswith("scratch_store") for a in accesses(functions["use_scratch"]))


def test_widths_by_name() -> None:
    lines = ["global_load_ubyte_d16_hi v1, v2, off", "buffer_store_short_d16_hi v1, off", "global_load_dwordx3 x"]
    assert sorted(a.width for a in accesses([*lines, "ds_read_b128 v1", "global_atomic_add v1"])) == [1, 2, 12]


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"\x7fELF\x02" + bytes(100)):
        (tmp_path / "x.co").write_bytes(content)
        with pytest.raises(InvalidArgumentError, match="must be an ELF file for AMD GPUs"):
            CodeObject(tmp_path / "x.co")


def test_what_the_emulator_misses(tmp_path: Path) -> None:
    assert "TINYGRAD_SRC" in (why_not(None) or "")
    assert "source checkout of tinygrad" in (why_not(str(tmp_path)) or "")


def reverse(toy: CodeObject, emulator: Emulator, name: str, source: Words, **options: int) -> Words:
    out = np.zeros_like(source)
    arguments = [pointer(source) + pointer(out) + struct.pack("<i4x", source.size - 12)]
    if name == "reverse_words":
        arguments.append(struct.pack("<I", 0x55))
    emulator.launch(toy, toy.kernel(name), (source.size // 256, 1, 1), (256, 1, 1), arguments, **options)
    return out


@pytest.mark.parametrize("turn", [1, 7, 1000])
def test_lds_barrier_and_permute(toy: CodeObject, emulator: Emulator, turn: int) -> None:
    source = words(768)
    got = reverse(toy, emulator, "reverse_words", source, seed=turn, slice_instructions=turn)
    used = np.where(np.arange(source.size) < source.size - 12, source, 0).astype(np.uint32)
    turned = used.reshape(-1, 256)[:, ::-1].reshape(-1)
    expected = ((turned >> 16) | (turned << 16)) ^ np.uint32(0x55)
    expected[-12:] = 0
    np.testing.assert_array_equal(got, expected)


def test_a_missing_barrier_shows(toy: CodeObject, emulator: Emulator) -> None:
    source = words(512)
    got = reverse(toy, emulator, "reverse_words_racing", source)
    assert not np.array_equal(got, source.reshape(-1, 256)[:, ::-1].reshape(-1))


def test_workgroups_may_wait_for_one_another(toy: CodeObject, emulator: Emulator) -> None:
    counter, sums = words(1) * 0, words(4 * 64)
    emulator.launch(toy, toy.kernel("meet"), (4, 1, 1), (64, 1, 1), [pointer(counter), pointer(sums)])
    assert counter[0] == 10
    np.testing.assert_array_equal(sums.reshape(4, 64), np.tile(10 + np.arange(64), (4, 1)))


def test_a_kernel_that_never_ends(toy: CodeObject, emulator: Emulator) -> None:
    counter, sums = np.full(1, 2**32 - 1, np.uint32), words(64)  # adding one wraps to 0, below what it waits for
    arguments = [pointer(counter), pointer(sums)]
    with pytest.raises(LaunchError, match="must end within 2000 instructions"):
        emulator.launch(toy, toy.kernel("meet"), (1, 1, 1), (64, 1, 1), arguments, max_instructions=2000)


def test_what_cannot_be_emulated_is_refused(toy: CodeObject, emulator: Emulator) -> None:
    data = words(64)
    arguments = [pointer(data), pointer(data)]
    with pytest.raises(LaunchError, match="flat"):
        emulator.launch(toy, toy.kernel("copy_flat"), (1, 1, 1), (64, 1, 1), arguments)
    with pytest.raises(InvalidArgumentError, match=r"must have \[8, 8\] bytes, got \[8\]"):
        emulator.launch(toy, toy.kernel("copy_flat"), (1, 1, 1), (64, 1, 1), arguments[:1])


def test_lanes_that_do_not_run_read_no_lds(toy: CodeObject, emulator: Emulator) -> None:
    places, out = words(64), np.full(64, 7, np.uint32)
    places[::3] = np.arange(0, 64, 3)[::-1]
    emulator.launch(toy, toy.kernel("read_some"), (1, 1, 1), (64, 1, 1), [pointer(places), pointer(out)])
    np.testing.assert_array_equal(out, np.where(places < 64, places * 3, 7))


def test_waves_have_scratch_of_their_own(toy: CodeObject, emulator: Emulator) -> None:
    held, out = words(256 * 64), words(256)
    arguments = [pointer(held), pointer(out), struct.pack("<i", 3)]
    emulator.launch(toy, toy.kernel("use_scratch"), (1, 1, 1), (256, 1, 1), arguments, slice_instructions=50)
    np.testing.assert_array_equal(out, held.reshape(256, 64)[:, 1])


def test_moves_between_lanes(toy: CodeObject, emulator: Emulator) -> None:
    """The compiler moves lanes of the register that it writes to."""
    values, out = words(64) >> 8, words(3 * 64)
    emulator.launch(toy, toy.kernel("wave_sums"), (1, 1, 1), (64, 1, 1), [pointer(values), pointer(out)])
    rows, pairs, wave = out.reshape(3, 4, 16)
    per_row = values.reshape(4, 16).sum(1)
    np.testing.assert_array_equal(rows[:, 15], per_row)
    np.testing.assert_array_equal(pairs[:, 15], [per_row[0], per_row[:2].sum(), per_row[2], per_row[2:].sum()])
    assert wave[3, 15] == values.sum()
    np.testing.assert_array_equal(wave[:2], pairs[:2])
    np.testing.assert_array_equal(wave[2:], pairs[2:] + pairs[1, 15])


def test_sixteen_bits_in_high_registers(toy: CodeObject, emulator: Emulator) -> None:
    """Sources, results and both at once, with a literal; lanes at rest keep what they have."""
    assert toy.kernel("high_registers").vgprs > 200
    halves = np.random.default_rng(1).normal(size=(128, 2)).astype(np.float16)
    values, out = halves.view(np.uint32).reshape(2, 64), words(6 * 64)
    emulator.launch(toy, toy.kernel("high_registers"), (1, 1, 1), (64, 1, 1), [pointer(values), pointer(out)])
    difference, total, wide, narrow, less, kept = out.reshape(6, 64)
    runs = (0x0FF0FFFFAAAAAAAA >> np.arange(64, dtype=np.uint64) & np.uint64(1)).astype(bool)
    a, b = (values & 0xFFFF).astype(np.uint16)
    assert not (kept - 12).any()
    np.testing.assert_array_equal(difference.astype(np.uint16), np.where(runs, a - b, 7))
    np.testing.assert_array_equal(total.astype(np.uint16), np.where(runs, b + np.uint16(0x1234), b))
    np.testing.assert_array_equal(wide[runs].view(np.float32), a.view(np.float16)[runs].astype(np.float32))
    np.testing.assert_array_equal(narrow.astype(np.uint16), np.where(runs, a, 7))
    np.testing.assert_array_equal(less, runs & (a < b + np.uint16(0x1234)))
    assert not (wide[~runs] - 7).any()


@pytest.mark.parametrize(("arch", "flavour"), [("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn)])
def test_from_fp8(code_objects: Any, emulator: Emulator, arch: str, flavour: torch.dtype) -> None:
    """Every code, by both instructions, in the flavour of the architecture."""
    code = code_objects("toy.cu", arch)
    codes, out = np.arange(256, dtype=np.uint8), np.zeros((64, 2, 4), np.float32)
    arguments = [pointer(codes.view(np.uint32)), pointer(out.view(np.uint32))]
    emulator.launch(code, code.kernel("from_fp8"), (1, 1, 1), (64, 1, 1), arguments)
    expected = torch.from_numpy(codes).view(flavour).float().numpy().reshape(64, 4)
    for half in (0, 1):
        np.testing.assert_array_equal(out[:, half], expected)
