# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The processes: vLLM's own server twice and the proxy, on this machine's loopback and without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

import flashinfer
from flashinfer.core.errors import FlashInferError

MODEL_NAME = "model"
PAGE_SIZE = 16
MAX_TOKENS = 2048
_KV_CACHE_BYTES = 256 << 20
_START_S = 600.0
_GRACE_S = 10.0
_STDERR_TAIL = 6000

_ENVIRONMENT = {
    "FLASHINFER_VLLM_CPU": "1",
    "HF_HUB_OFFLINE": "1",
    # Both engines share the machine's cores; with two threads each a step took twenty times as long on two cores.
    "OMP_NUM_THREADS": "1",
    # vLLM compiles a helper of its sampler on the first request, which takes longer than all requests together.
    "TORCH_COMPILE_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    # A server's engine is a second process: forked, it need not import vLLM again, which takes 17 s of a core.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
# What the user has set stays.
_DEFAULTS = {
    "NIXL_LOG_LEVEL": "WARN",
    "UCX_LOG_LEVEL": "error",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "self,sm,tcp",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class ServerError(FlashInferError, RuntimeError):
    """A server ended, or did not come up; the message holds the end of what it printed."""


class Servers:
    """Server processes by name; leaving the context ends them and what they started."""

    def __init__(self) -> None:
        self._processes: dict[str, tuple[subprocess.Popen[bytes], IO[bytes], str]] = {}
        self._files = contextlib.ExitStack()

    def start_engine(self, name: str, checkpoint: Path, pages: str, role: str, port: int, side_port: int) -> str:
        """Start `vllm serve`; its address."""
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": "flashinfer.integrations.vllm.nixl",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"convert_kv_pages": True} if pages == "shuffled" else {},
        }
        command = [
            *("-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
            *("--attention-backend", "CUSTOM", "--block-size", str(PAGE_SIZE), "--no-enable-prefix-caching"),
            *("--max-model-len", str(MAX_TOKENS), "--max-num-seqs", "4"),
            *("--kv-cache-memory-bytes", str(_KV_CACHE_BYTES), "--kv-transfer-config", json.dumps(transfer)),
        ]
        variables = {"FLASHINFER_VLLM_PAGES": pages, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
        return self._start(name, command, port, variables)

    def start_proxy(self, prefill: str, decode: str, port: int) -> str:
        """Start the proxy; its address."""
        return self._start("proxy", ["-m", "flashinfer.cli.vllm_job.proxy", prefill, decode, str(port)], port, {})

    def wait(self) -> None:
        """Until all of them answer.

        Raises
        ------
        ServerError
            If one ends, or takes longer than ten minutes.
        """
        end = time.monotonic() + _START_S
        for name, (process, _, address) in self._processes.items():
            while not _is_healthy(address):
                if process.poll() is not None:
                    raise self._failure(name, f"ended with status {process.returncode}")
                if time.monotonic() > end:
                    raise self._failure(name, f"was not up after {_START_S:.0f} s")
                time.sleep(0.3)

    def _start(self, name: str, command: Sequence[str], port: int, variables: dict[str, str]) -> str:
        # Open for as long as the process runs: it is read only if the process fails.
        printed = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        search = [str(Path(flashinfer.__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        inherited = {k: v for k, v in os.environ.items() if k != "VLLM_TARGET_DEVICE"}
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**_DEFAULTS, **inherited, **_ENVIRONMENT, **variables, "PYTHONPATH": os.pathsep.join(search)},
            start_new_session=True,
        )
        address = f"http://127.0.0.1:{port}"
        self._processes[name] = (process, printed, address)
        return address

    def _failure(self, name: str, how: str) -> ServerError:
        printed = self._processes[name][1]
        end = printed.seek(0, os.SEEK_END)
        printed.seek(max(0, end - _STDERR_TAIL))
        tail = printed.read().decode("utf-8", "replace").strip()
        return ServerError(f"the {name} server {how}; it printed:\n{tail}")

    def __enter__(self) -> Servers:
        # They are in sessions of their own, and would outlive a parent that is told to end.
        self._former = signal.signal(signal.SIGTERM, _leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, _, _ in self._processes.values():
            _signal(process, signal.SIGTERM)
        for process, _, _ in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            # What it started, or all of it if it did not listen.
            _signal(process, signal.SIGKILL)
            process.wait()
        signal.signal(signal.SIGTERM, self._former)
        self._files.close()


def free_ports(count: int) -> list[int]:
    """Ports that nobody has; below the ephemeral range, where a transfer library may take one in between."""
    found: list[int] = []
    for port in range(18000 + os.getpid() % 2000 * 6, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ServerError("no free ports between 18000 and 32000")


def _is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
