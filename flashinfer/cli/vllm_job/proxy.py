# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer.cli.vllm_job.proxy PREFILL DECODE PORT`: one address in front of a prefill and a decoder.

A request goes to the prefill for one token, whose answer says where its pages are; then, with that, to the decoder,
whose answer the client gets as it comes.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flashinfer.cli.vllm_job.client import RequestError, ask, post

COMPLETIONS = "/v1/completions"
_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def prefill_request(body: dict[str, Any]) -> dict[str, Any]:
    """What the prefill is asked: the prompt, one token, and to keep the pages."""
    shortened = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    return {**shortened, "max_tokens": 1, "kv_transfer_params": _REMOTE_DECODE}


class Proxy(ThreadingHTTPServer):
    """The proxy's server; `prefill` and `decode` are addresses such as `http://127.0.0.1:8100`."""

    def __init__(self, prefill: str, decode: str, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.prefill, self.decode = prefill, decode


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, "text/plain", b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != COMPLETIONS:
            self._answer(404, "text/plain", b"")
            return
        try:
            pages = ask(self.server.prefill + COMPLETIONS, prefill_request(body))["kv_transfer_params"]
            with post(self.server.decode + COMPLETIONS, {**body, "kv_transfer_params": pages}) as response:
                self.send_response(200)
                self.send_header("Content-Type", response.headers["Content-Type"])
                self.end_headers()
                for line in response:
                    self.wfile.write(line)
                    self.wfile.flush()
        except RequestError as error:
            self._answer(502, "application/json", json.dumps({"error": str(error)}).encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the servers behind it log."""


if __name__ == "__main__":
    Proxy(sys.argv[1], sys.argv[2], int(sys.argv[3])).serve_forever()
