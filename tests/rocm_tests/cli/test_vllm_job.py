# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The proxy and the client of `handoff-vllm`, between servers that only pretend; the verdict of a report."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flashinfer.cli import main
from flashinfer.cli.handoff_vllm import Report
from flashinfer.cli.vllm_job import checkpoint as checkpoints
from flashinfer.cli.vllm_job import client, servers
from flashinfer.cli.vllm_job.proxy import COMPLETIONS, Proxy

PAGES = {"do_remote_prefill": True, "remote_block_ids": [[1, 5, 2]]}


class Upstream(ThreadingHTTPServer):
    """Answers what it is told to, and keeps what it was asked."""

    asked: list[dict[str, Any]]

    def __init__(self, lines: list[str], status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Upstream)
        self.lines, self.status, self.asked = lines, status, []
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class _Upstream(BaseHTTPRequestHandler):
    server: Upstream

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer()

    def _answer(self) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write("".join(f"{line}\n" for line in self.server.lines).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def event(text: str, *ids: int) -> str:
    return "data: " + json.dumps({"choices": [{"text": text, "token_ids": list(ids)}]})


@pytest.fixture
def upstreams() -> Iterator[list[Upstream]]:
    made = [
        Upstream([json.dumps({"kv_transfer_params": PAGES})]),
        Upstream([event("Bread", 7), "", event(" is", 8, 9), "", "data: [DONE]"]),
    ]
    yield made
    for upstream in made:
        upstream.shutdown()
        upstream.server_close()


@pytest.fixture
def proxy(upstreams: list[Upstream]) -> Iterator[str]:
    served = Proxy(upstreams[0].address, upstreams[1].address, 0)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    served.server_close()


def test_a_request_is_prefilled_then_decoded_and_streamed(upstreams: list[Upstream], proxy: str) -> None:
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 5, "stream_options": {"include_usage": True}}
    assert list(client.stream(proxy + COMPLETIONS, body)) == [("Bread", [7]), (" is", [8, 9])]
    (prefill,), (decode,) = upstreams[0].asked, upstreams[1].asked
    assert prefill["max_tokens"] == 1
    assert prefill["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert not {"stream", "stream_options"} & set(prefill), "one answer, which says where the pages are"
    assert decode["kv_transfer_params"] == PAGES
    assert (decode["max_tokens"], decode["stream"], decode["prompt"]) == (5, True, [1, 2])


def test_a_refusal_reaches_the_client(upstreams: list[Upstream], proxy: str) -> None:
    upstreams[0].status = 500
    with pytest.raises(client.RequestError, match=r"answered 502: .*answered 500"):
        list(client.stream(proxy + COMPLETIONS, {}))
    assert upstreams[1].asked == []
    with pytest.raises(client.RequestError, match="answered 404"):
        client.ask(proxy + "/v1/models", {})


def test_an_error_in_the_stream_is_raised(upstreams: list[Upstream], proxy: str) -> None:
    upstreams[1].lines = [event("Bread", 7), "data: " + json.dumps({"error": {"message": "no pages"}})]
    with pytest.raises(client.RequestError, match="no pages"):
        list(client.stream(proxy + COMPLETIONS, {}))


def test_metrics_are_summed_over_labels() -> None:
    upstream = Upstream(
        ["# HELP a b", 'a_total{engine="0"} 2.0', 'a_total{engine="1"} 3', 'b_bucket{le="1"} 9', "c 1e-3"]
    )
    assert client.metrics(upstream.address) == {"a_total": 5.0, "c": 0.001}
    upstream.shutdown()
    upstream.server_close()


REPORT = Report(
    prompt_tokens=20,
    expected_pages=2,
    expected_bytes=200,
    pages_converted=2,
    bytes_converted=200,
    bytes_moved=200,
    transfer_seconds=0.001,
    convert_seconds=0.002,
    first_token_seconds=0.1,
    total_seconds=1.0,
    token_ids=[1, 2, 3],
    colocated_token_ids=[1, 2, 3],
    text="abc",
)


def test_the_verdict_needs_equal_tokens_and_pages_that_moved() -> None:
    assert REPORT.identical
    assert REPORT.lines()[-1] == "verdict: identical"
    for change in (
        {"token_ids": [1, 2, 4]},
        {"token_ids": [], "colocated_token_ids": []},
        {"pages_converted": 0},
        {"bytes_converted": 100},
        {"bytes_moved": 0},
    ):
        changed = dataclasses.replace(REPORT, **change)
        assert not changed.identical, change
        assert changed.lines()[-1].startswith("verdict: not identical"), change
        assert changed.to_json()["verdict"] == "not identical"


def test_a_server_that_ends_is_reported_with_what_it_printed() -> None:
    with servers.Servers() as started:
        started._start("prefill", ["-c", "print('no such model'); raise SystemExit(3)"], servers.free_ports(1)[0], {})
        with pytest.raises(servers.ServerError, match=r"prefill server ended with status 3(.|\n)*no such model"):
            started.wait()


def test_servers_end_with_the_context_and_so_does_what_they_started(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid) + chr(10)); time.sleep(60)"
    )
    with servers.Servers() as started:
        started._start("prefill", ["-c", script], servers.free_ports(1)[0], {})
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text().endswith("\n"):
            pass
        child = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    while _is_running(child):
        assert time.monotonic() < end, "what the server started outlives it"


def _is_running(pid: int) -> bool:
    """Not so if it is dead and waits for whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_checkpoint_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "toy.gguf"
    gguf.write_bytes(b"1234")
    made: list[Path] = []

    def write(source: Path, folder: Path) -> None:
        made.append(folder)
        if len(made) == 1:
            raise OSError("disk full")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(checkpoints, "write_checkpoint", write)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.checkpoint(gguf, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [], "nothing half done stays"
    folder = checkpoints.checkpoint(gguf, tmp_path / "cache")
    assert (folder / "config.json").is_file()
    assert checkpoints.checkpoint(gguf, tmp_path / "cache") == folder
    assert len(made) == 2
    gguf.write_bytes(b"another size")
    assert checkpoints.checkpoint(gguf, tmp_path / "cache") != folder


@pytest.mark.parametrize("count", ["0", "2048"])
def test_what_is_wrong_is_said_before_anything_starts(capsys: pytest.CaptureFixture[str], count: str) -> None:
    assert main(["handoff-vllm", "--max-new-tokens", count]) == 1
    assert f"--max-new-tokens must be at least 1 and below 2048, got {count}" in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("vllm", "gguf") else find(name))
    assert main(["handoff-vllm"]) == 1
    said = capsys.readouterr().err
    assert "packages not installed: gguf" in said
    assert "vllm" in said
    assert "make demo-vllm" in said
