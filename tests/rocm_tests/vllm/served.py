# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The tests' side of engines in processes of their own, and a model that is small and knows nothing."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
PAGE_SIZE = 16
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
# Limits for what went wrong: an idle machine needs a quarter of a minute and a second.
START_S, ANSWER_S = 600, 300

_ENVIRONMENT = {
    "FLASHINFER_VLLM_CPU": "1",
    "HF_HUB_OFFLINE": "1",
    "NIXL_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "UCX_LOG_LEVEL": "error",
    "UCX_NET_DEVICES": "lo",
    # No shared memory: a stopped peer must really stop a transfer.
    "UCX_TLS": "tcp,self",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}


def free_ports(count: int, apart: int = 1) -> list[int]:
    """Ports below the ephemeral range, where UCX listens; each engine may have `apart` of them."""
    found: list[int] = []
    for port in range(13000 + os.getpid() * 61 % 6000, 20000, apart):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free port")


def make_model(folder: Path, num_kv_heads: int, queries: int = 3) -> Any:
    """A Llama with random weights; the Hugging Face model, which is the oracle."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = num_kv_heads * queries
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32 * heads,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        # Far from uniform logits: no near ties between tokens.
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Hugging Face's tokens."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


class Nursery:
    """The process that engines are forked from; the constructor does not wait for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._address = folder, folder / "nursery"
        self._printed = folder / "nursery.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        with self._printed.open("wb") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rocm_tests.vllm.engine_child", str(self._address)],
                env={
                    **environment,
                    **_ENVIRONMENT,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path]),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                start_new_session=True,
            )
        self._is_ready = False

    def connect(self) -> socket.socket:
        """A new engine's end of a connection, once there can be engines."""
        if not self._is_ready:
            assert self._process.stdout is not None
            assert select.select([self._process.stdout], [], [], START_S)[0], f"no engines after {START_S} s"
            said = self._process.stdout.readline()
            assert said == b"ready\n", self._printed.read_text()[-4000:]
            self._is_ready = True
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._address))
        return connection

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class EngineProcess:
    """One engine; the constructor does not wait until it is ready."""

    def __init__(
        self, nursery: Nursery, model: Path, pages: str, role: str | None, port: int | None = None, **setup: Any
    ) -> None:
        self.port = port or free_ports(1)[0]
        extra = {"num_threads": 0, **({"convert_kv_pages": True} if pages == "shuffled" else {})}
        if role is not None:
            setup["transfer"] = {
                "kv_connector": setup.pop("connector", "NixlConnector"),
                "kv_connector_module_path": "flashinfer.integrations.vllm.nixl",
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_connector_extra_config": {**extra, **setup.pop("extra", {})},
            }
        setup = {"model": str(model), "enable_prefix_caching": False, **setup}
        self._connection = nursery.connect()
        self._stream = self._connection.makefile("rw")
        handle, name = tempfile.mkstemp(suffix=".log", dir=nursery.folder)
        os.close(handle)
        self._printed = Path(name)
        environment = {"FLASHINFER_VLLM_PAGES": pages, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port)}
        if "layout" in setup:
            environment["VLLM_KV_CACHE_LAYOUT"] = setup.pop("layout")
        self._say({"setup": setup, "environment": environment, "printed": name})
        self.pid: int = self._answer(ANSWER_S)
        self._is_ready = False

    def ready(self) -> EngineProcess:
        if not self._is_ready:
            assert self._answer(START_S) == "ready"
            self._is_ready = True
        return self

    def ask(self, name: str, /, *, timeout: float = ANSWER_S, **arguments: Any) -> Any:
        """One call of the child's `Server`."""
        self._say([name, arguments])
        return self._answer(timeout)

    def run(self, name: str, prompt: list[int], count: int, transfer: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request from its beginning to its end."""
        self.ask("add", name=name, prompt=prompt, count=count, transfer=transfer)
        finished = self.ask("steps", seconds=ANSWER_S / 2, names=[name])
        assert name in finished, f"{name} did not finish; {self.tail()}"
        return finished[name]

    def prefill(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """What a decoder must be told to take the prompt's pages from here."""
        done = self.run(name, prompt, 1, PREFILL)
        assert done["transfer"], done
        return done["transfer"]

    def step_until(self, condition: Callable[[], bool], *others: EngineProcess) -> None:
        """Step, the others too, until it holds; nothing may finish here meanwhile."""
        end = time.monotonic() + ANSWER_S
        while not condition():
            assert time.monotonic() < end, f"still not so after {ANSWER_S} s; {self.tail()}"
            for engine in (self, *others):
                finished = engine.ask("steps", seconds=0.02, names=["never"])
                assert finished == {}, finished

    def stop(self) -> None:
        """The process stands still, its sockets stay open."""
        os.killpg(self.pid, signal.SIGSTOP)
        # One thread takes the signal and stops the others. Until it has its turn, a transfer could still be served.
        end = time.monotonic() + ANSWER_S
        while not all(_is_stopped(task) for task in Path(f"/proc/{self.pid}/task").iterdir()):
            assert time.monotonic() < end, f"{self.pid} does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, for its workers too; to be repeated without harm."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # The end of the connection is the end of the process, whose parent is another.
        with contextlib.suppress(ConnectionError):
            while select.select([self._connection], [], [], ANSWER_S)[0] and self._connection.recv(4096):
                pass

    def tail(self) -> str:
        return self._printed.read_text(errors="replace")[-4000:]

    def _say(self, words: Any) -> None:
        self._stream.write(json.dumps(words) + "\n")
        self._stream.flush()

    def _answer(self, timeout: float) -> Any:
        # One line at a time is on its way, so nothing is left in the stream's buffer.
        assert select.select([self._connection], [], [], timeout)[0], f"no answer in {timeout} s; {self.tail()}"
        line = self._stream.readline()
        assert line, f"the engine ended; {self.tail()}"
        return json.loads(line)


def _is_stopped(task: Path) -> bool:
    # Behind the name, which is in parentheses and may hold anything.
    return (task / "stat").read_text().rpartition(") ")[2].startswith("T")


@contextlib.contextmanager
def killing(*engines: EngineProcess) -> Iterator[None]:
    try:
        yield
    finally:
        for engine in engines:
            engine.kill()
