# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A child's line to its parent: JSON lines on what were its standard input and output."""

from __future__ import annotations

import json
import os
import queue
import threading
from typing import Any


class Channel:
    """The child's end. Made first in the process, since it takes standard output for itself."""

    def __init__(self) -> None:
        # Libraries print; whatever they print goes to standard error, which the parent keeps for the case of failure.
        self._events = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, event: str, **fields: object) -> None:
        """Tell the parent."""
        self._events.write(json.dumps({"event": event, **fields}) + "\n")
        self._events.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the parent's next message."""
        return self._received.get()

    def _listen(self) -> None:
        # Unbuffered: a thread inside a buffered reader would hold its lock when the interpreter shuts down.
        with open(0, "rb", buffering=0, closefd=False) as messages:
            for line in messages:
                self._received.put(json.loads(line))
        # The parent holds this pipe open for the child's whole life. It is gone, and a child must not outlive it.
        os._exit(1)


def peak_resident_bytes() -> int:
    """The most memory this process had resident.

    Not `getrusage`: its figure survives exec, so that a child of a large parent would report the parent's.
    """
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM line")
