# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""csrc_rocm/aiter/entry.cc by itself: AITER's stream and can-throw flag are set for a call and put back after it."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

import pytest
import torch

from flashinfer.core.aiter_install import find_aiter
from flashinfer.jit import aiter_lib
from flashinfer.jit.cache import csrc_root
from rocm_tests.backends.aiter_standin import DATA, found, install


class Argument(ctypes.Structure):
    _fields_ = (
        ("tensor", c_void_p),
        ("data", c_void_p),
        ("numel", c_int64),
        ("sizes", c_int64 * 4),
        ("strides", c_int64 * 4),
        ("rank", c_int32),
    )

    @classmethod
    def of(cls, t: torch.Tensor) -> Argument:
        a = cls(None, t.data_ptr(), t.numel(), rank=t.dim())
        a.sizes[: t.dim()], a.strides[: t.dim()] = list(t.shape), list(t.stride())
        return a


class Append(ctypes.Structure):
    _fields_ = (
        *((name, Argument) for name in ("key", "value", "k_cache", "v_cache", "slots", "scale")),
        ("type", c_int32),
        ("device", c_int32),
        ("stream", c_uint64),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The entry, the stand-in and a caller in one shared object, without torch."""
    folder = tmp_path_factory.mktemp("entry")
    with found(install("own_typed", folder / "site")):
        aiter = find_aiter()
        assert aiter is not None
        spec = aiter_lib.cache_spec(aiter)
    assert spec.defines == (("FI_AITER_TORCH", "0"), ("FI_AITER_STREAM", "1"), ("FI_AITER_CAN_THROW", "1"))
    (folder / "fi_config.h").write_text(spec.config_header())
    sources = [csrc_root() / "aiter/entry.cc", aiter.csrc / "kernels/cache_kernels.cu", DATA / "entry_state.cc"]
    includes = [f"-I{path}" for path in (folder, csrc_root(), aiter.csrc / "include")]
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-x", "c++", *includes]
    subprocess.run([*command, *map(str, sources), "-o", str(folder / "entry.so")], check=True)
    return ctypes.CDLL(str(folder / "entry.so"))


class Call:
    """One row to slot 5 of two pages of 4 tokens."""

    def __init__(self) -> None:
        self.rows, self.caches = torch.randn(2, 1, 2, 8), torch.zeros(2, 2, 4, 2, 8)
        self.slots, self.scale = torch.tensor([5]), torch.ones(1)
        tensors = (*self.rows, *self.caches, self.slots, self.scale)
        self.struct = Append(*map(Argument.of, tensors), type=0, device=-1, stream=0x1234)

    def run(self, library: ctypes.CDLL, stream: int, can_throw: int) -> tuple[int, str, int, int]:
        message, after, throws = ctypes.create_string_buffer(40), c_size_t(stream), c_int(can_throw)
        code = library.call_with_state(
            ctypes.byref(self.struct), message, c_size_t(len(message)), ctypes.byref(after), ctypes.byref(throws)
        )
        return code, message.value.decode(), after.value, throws.value


@pytest.mark.parametrize("can_throw", [0, 1])
@pytest.mark.parametrize("stream", [0, 0xABC0])
def test_state_is_set_and_put_back(
    library: ctypes.CDLL, stream: int, can_throw: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_STANDIN_LOG", str(tmp_path / "log"))
    call = Call()
    assert call.run(library, stream, can_throw) == (0, "", stream, can_throw)
    assert (tmp_path / "log").read_text() == f"rows=1 device=-1 stream={0x1234} can_throw=1\n"
    assert torch.equal(call.caches[:, 1, 1], call.rows[:, 0])
    assert int(call.caches.count_nonzero()) == 32


@pytest.mark.parametrize("can_throw", [0, 1])
def test_state_is_put_back_after_a_refusal(
    library: ctypes.CDLL, can_throw: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the flag the failed check would have ended this process."""
    monkeypatch.setenv("FLASHINFER_STANDIN_REFUSE", "1")
    whole = "[AITER] the stand-in was told to refuse"
    assert Call().run(library, 0x77, can_throw) == (-1, whole, 0x77, can_throw)
    assert len(whole) == 39, "just fits the 40 bytes given"


def test_a_long_message_is_cut(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_STANDIN_REFUSE", "1")
    message, stream, throws = ctypes.create_string_buffer(b"x" * 12, 12), c_size_t(0), c_int(0)
    call = Call()
    for size in (8, 0):
        arguments = (ctypes.byref(call.struct), c_char_p(ctypes.addressof(message)), c_size_t(size))
        assert library.call_with_state(*arguments, ctypes.byref(stream), ctypes.byref(throws)) == -1
        assert message.raw == b"[AITER]\0xxxx"
