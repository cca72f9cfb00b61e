# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The prefill's and the decoder's control connection: JSON lines over a loopback socket. Pages never pass here."""

from __future__ import annotations

import json
import socket
from types import TracebackType
from typing import Any

from flashinfer.cli.handoff_job.transfer import TransferError

LOOPBACK = "127.0.0.1"


class SideChannel:
    """One end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rwb")

    def send(self, message: dict[str, object]) -> None:
        """Send one message."""
        self._lines.write(json.dumps(message).encode("utf-8") + b"\n")
        self._lines.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the next message."""
        line = self._lines.readline()
        if not line:
            raise TransferError("the peer closed the connection before the hand-off was over")
        message: dict[str, Any] = json.loads(line)
        return message

    def __enter__(self) -> SideChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        self._connection.close()


def listen() -> socket.socket:
    """A listening socket on a free loopback port."""
    return socket.create_server((LOOPBACK, 0), backlog=1)


def accept(listener: socket.socket) -> SideChannel:
    """Wait for the one peer."""
    connection, _ = listener.accept()
    listener.close()
    return SideChannel(connection)


def connect(port: int) -> SideChannel:
    """Connect to a listener of this machine."""
    return SideChannel(socket.create_connection((LOOPBACK, port)))
