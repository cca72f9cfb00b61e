# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The engines of a test; imported on first use, so that this file needs no vLLM."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

# vLLM reads its own when it is imported. Transfers stay on this machine.
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,sm,self",
    "UCX_NET_DEVICES": "lo",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
}
# Before any test module imports vLLM, which then settles on a platform for good.
if importlib.util.find_spec("vllm") is not None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def engines() -> Any:
    """The module `rocm_tests.vllm.engines`, which imports vLLM."""
    from flashinfer.integrations.vllm.cpu.transfers import let_progress_threads_sleep
    from rocm_tests.vllm import engines

    let_progress_threads_sleep()
    return engines


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Where real engines come from."""
    pytest.importorskip("vllm", reason="needs vLLM")
    import torch

    from rocm_tests.vllm import served

    # The cores are the engines'; with two threads beside them the oracle took twenty times as long.
    torch.set_num_threads(1)
    nursery = served.Nursery(tmp_path_factory.mktemp("engines"))
    yield nursery
    nursery.close()


@pytest.fixture
def fleet(engines: Any) -> Iterator[Any]:
    fleet = engines.Fleet()
    yield fleet
    fleet.close()


@pytest.fixture(params=["standard", "shuffled"])
def pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Chosen with this package's variable; the fixture `engines` has set vLLM's environment up."""
    request.getfixturevalue("engines")
    monkeypatch.setenv("FLASHINFER_VLLM_PAGES", request.param)
    monkeypatch.delenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", raising=False)
    return request.param
