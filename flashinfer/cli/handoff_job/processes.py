# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The parent's side: start children, talk to them, notice when one fails, leave none behind."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import flashinfer
from flashinfer.core.errors import FlashInferError

Event = dict[str, Any]

_STDERR_TAIL = 6000
_GRACE_S = 5.0

# Quiet, and reachable from this machine only. What the user has set stays.
_TRANSPORT = {
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "WARN",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "self,sm,tcp",
}
_LIBRARIES = {
    # torch and the compiled kernels may each bring an OpenMP runtime; the variable speaks to both.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class ChildError(FlashInferError, RuntimeError):
    """A child process ended before its work was done; the message holds the end of what it printed."""


@dataclasses.dataclass
class _Child:
    process: subprocess.Popen[str]
    stderr: IO[bytes]
    events: collections.deque[Event]
    done: bool = False


class Children:
    """Child processes by name; leaving the context ends those that still run.

    Parameters
    ----------
    on_status
        Called with a child's name and a line for people.
    command
        Arguments of the interpreter for a child; role, model and dtype are appended.
    """

    def __init__(
        self,
        on_status: Callable[[str, str], None],
        command: Sequence[str] = ("-m", "flashinfer.cli.handoff_job.child"),
    ) -> None:
        self._on_status = on_status
        self._command = [sys.executable, *command]
        self._children: dict[str, _Child] = {}
        self._files = contextlib.ExitStack()
        self._events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()

    def start(self, name: str, role: str, gguf: Path, dtype: str) -> None:
        """Start a child; it loads the model at once."""
        # Open for as long as the child runs: it is read only if the child fails.
        stderr = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        process = subprocess.Popen(
            [*self._command, role, str(gguf), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_environment(),
            text=True,
            encoding="utf-8",
        )
        self._children[name] = _Child(process, stderr, collections.deque())
        threading.Thread(target=self._listen, args=(name, process), daemon=True).start()

    def send(self, name: str, message: dict[str, object]) -> None:
        """Send a child a message."""
        pipe = self._children[name].process.stdin
        if pipe is None:
            raise ChildError(f"the {name} process has no input")
        try:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failure(name) from None

    def receive(self, name: str) -> Event:
        """The child's next event, status lines apart. Raises as soon as any child fails, this or another."""
        child = self._children[name]
        while not child.events:
            source, event = self._events.get()
            if event["event"] == "exit":
                if not self._children[source].done:
                    raise self._failure(source)
            elif event["event"] == "status":
                self._on_status(source, event["text"])
            else:
                self._children[source].done |= event["event"] == "done"
                self._children[source].events.append(event)
        return child.events.popleft()

    def expect(self, name: str, kind: str) -> Event:
        """The child's next event, which is of this kind."""
        event = self.receive(name)
        if event["event"] != kind:
            raise ChildError(f"the {name} process sent {event['event']!r} where {kind!r} was due")
        return event

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            self._events.put((name, json.loads(line)))
        self._events.put((name, {"event": "exit"}))

    def _failure(self, name: str) -> ChildError:
        child = self._children[name]
        status = child.process.wait()
        end = child.stderr.seek(0, os.SEEK_END)
        child.stderr.seek(max(0, end - _STDERR_TAIL))
        printed = child.stderr.read().decode("utf-8", "replace").strip()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return ChildError(f"the {name} process {how} before its work was done; it printed:\n{printed}")

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():
            if child.done:
                _wait_or_kill(child.process)
            else:
                child.process.kill()
                child.process.wait()
            for pipe in (child.process.stdin, child.process.stdout):
                if pipe is not None:
                    pipe.close()
        self._files.close()


def _wait_or_kill(process: subprocess.Popen[str]) -> None:
    """For a child that has reported its end: give libraries a moment to shut down."""
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    package_root = str(Path(flashinfer.__file__).resolve().parents[1])
    search = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**_TRANSPORT, **os.environ, **_LIBRARIES, "PYTHONPATH": os.pathsep.join(search)}
