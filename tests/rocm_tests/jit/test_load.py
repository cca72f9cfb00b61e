# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Loading: a real shim with torch's headers, compiled once for this file."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashinfer.core.errors import BackendUnavailableError, InvalidArgumentError
from flashinfer.jit import JitSpec, Module, load, load_module
from flashinfer.jit.load import load_for
from flashinfer.jit.toolchain import Toolchain

SPEC = JitSpec(
    name="toy_fill",
    ops=("toy_fill",),
    shims=("shims/toy_fill.cc",),
    kernels_cpu=("kernels_cpu/toy_fill.cc",),
    defines=(("TOY_FACTOR", "2.0f"),),
)
SHIM = """
#include <ATen/core/Tensor.h>
#include <torch/library.h>
void toy_kernel(float* out, long long size, float value);
namespace {
void toy_fill(at::Tensor& out, double value) {
  toy_kernel(out.data_ptr<float>(), out.numel(), static_cast<float>(value));
}
}  // namespace
TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) { m.def("toy_fill(Tensor(a!) out, float value) -> ()"); }
TORCH_LIBRARY_IMPL(FI_NAMESPACE, CPU, m) { m.impl("toy_fill", toy_fill); }
"""
KERNEL = """
#include "fi_config.h"
void toy_kernel(float* out, long long size, float value) {
#pragma omp parallel for
  for (long long i = 0; i < size; ++i) out[i] = value * TOY_FACTOR;
}
"""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """The module, loaded by eight threads at once."""
    root = tmp_path_factory.mktemp("csrc")
    for name, text in (("shims/toy_fill.cc", SHIM), ("kernels_cpu/toy_fill.cc", KERNEL)):
        (root / name).parent.mkdir()
        (root / name).write_text(text)
    loaded: list[Module] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("FLASHINFER_AOT_DIR", str(root / "none"))
        threads = [threading.Thread(target=lambda: loaded.append(load_module(SPEC, CPU, csrc=root))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(loaded) == 8
    assert all(m is loaded[0] for m in loaded)
    return loaded[0]


def test_op_runs(module: Module) -> None:
    out = torch.zeros(1000)
    assert module.toy_fill(out, 3.0) is None
    assert torch.equal(out, torch.full((1000,), 6.0))
    assert module.namespace == "flashinfer_toy_fill_cpu"
    assert module.toy_fill is torch.ops.flashinfer_toy_fill_cpu.toy_fill.default._op


def test_later_loads_look_at_nothing(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_for", None)
    assert load_module(SPEC, torch.device("cpu")) is module


def test_unknown_op_is_an_attribute_error(module: Module) -> None:
    with pytest.raises(AttributeError, match="no_such_op"):
        _ = module.no_such_op


def test_fake_and_compile(module: Module) -> None:
    with FakeTensorMode():
        assert module.toy_fill(torch.empty(4, device="cuda"), 1.0) is None

    @torch.compile(fullgraph=True, backend="aot_eager")
    def filled(x: torch.Tensor) -> torch.Tensor:
        torch.ops.flashinfer_toy_fill_cpu.toy_fill.default(x, 1.0)
        return x + 1

    x = torch.zeros(4)
    assert torch.equal(filled(x), torch.full((4,), 3.0))
    assert torch.equal(x, torch.full((4,), 2.0)), "the write is lost"


def test_another_spec_of_the_same_name_is_refused(module: Module) -> None:
    other = dataclasses.replace(SPEC, defines=(("TOY_FACTOR", "3.0f"),))
    with pytest.raises(InvalidArgumentError, match="'toy_fill' must be the one loaded before"):
        load_for(other, Toolchain("cpu"))


def test_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "toy_broken.so"
    file.write_text("not a library")
    monkeypatch.setattr(load, "obtain", lambda spec, toolchain, csrc: (toolchain, file))
    with pytest.raises(BackendUnavailableError, match=r"'toy_broken' at .* must load"):
        load_for(dataclasses.replace(SPEC, name="toy_broken"), Toolchain("cpu"))
