# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer handoff-vllm`: the hand-off with two real vLLM servers, on one machine without a GPU.

The prefill keeps `standard` pages, the decoder `shuffled` ones, both with this package's attention backend and NIXL
connector; a small proxy is in front of them. The prompt is answered through the proxy, and the text shown as it comes.
Then the prefill is asked the same alone: an engine that does both, on standard pages.

The verdict is "identical" if the tokens are, and if the decoder reports that it has received and converted the prompt's
pages: equal tokens alone could also come from a decoder that computed the prompt itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Callable

from flashinfer.cli.handoff import MissingPackageError, gguf_path
from flashinfer.cli.handoff_job.gguf_file import GGUFFile
from flashinfer.cli.handoff_job.model import LlamaConfig
from flashinfer.cli.handoff_job.report import Comparison
from flashinfer.cli.vllm_job import client
from flashinfer.cli.vllm_job.checkpoint import checkpoint
from flashinfer.cli.vllm_job.proxy import COMPLETIONS
from flashinfer.cli.vllm_job.servers import MAX_TOKENS, MODEL_NAME, PAGE_SIZE, Servers, free_ports
from flashinfer.core.errors import InvalidArgumentError
from flashinfer.jit.cache import cache_root
from flashinfer.kv import PageFormat

_PACKAGES = ("gguf", "nixl", "safetensors", "transformers", "vllm")
_PROMPT = "Tell me in a few sentences how bread is made."
# Metrics follow the step that they are about.
_METRICS_S = 10.0


@dataclasses.dataclass(frozen=True)
class Report:
    """One run. Times in seconds, sizes in bytes."""

    prompt_tokens: int
    expected_pages: int
    expected_bytes: int
    pages_converted: int
    bytes_converted: int
    bytes_moved: int
    transfer_seconds: float
    convert_seconds: float
    first_token_seconds: float
    total_seconds: float
    token_ids: list[int]
    colocated_token_ids: list[int]
    text: str

    @property
    def comparison(self) -> Comparison:
        """The hand-off against one engine."""
        return Comparison("hand-off", "one vLLM engine on standard pages", self.colocated_token_ids, self.token_ids)

    @property
    def has_moved_all(self) -> bool:
        """Whether just the prompt's pages were received and converted."""
        moved = (self.pages_converted, self.bytes_converted, self.bytes_moved)
        return moved == (self.expected_pages, self.expected_bytes, self.expected_bytes)

    @property
    def identical(self) -> bool:
        """The verdict."""
        return bool(self.token_ids) and self.comparison.identical and self.has_moved_all

    def lines(self) -> list[str]:
        """The report for people, the verdict last."""
        rows = {
            "prompt tokens": str(self.prompt_tokens),
            "new tokens": str(len(self.token_ids)),
            "bytes moved": f"{self.bytes_moved:,} (the prompt's pages: {self.expected_bytes:,})",
            "transfer": f"{self.transfer_seconds * 1e3:.2f} ms",
            "pages converted": f"{self.pages_converted} of {self.expected_pages}, standard to shuffled",
            "conversion": f"{self.convert_seconds * 1e3:.2f} ms, until the engine's next step saw it",
            "first token": f"{self.first_token_seconds * 1e3:.0f} ms",
            "all tokens": f"{self.total_seconds * 1e3:.0f} ms",
        }
        width = max(map(len, rows))
        verdict = "identical" if self.identical else "not identical"
        if self.comparison.identical and not self.has_moved_all:
            verdict += ": the tokens are, but the decoder did not get them from the prompt's converted pages alone"
        table = [f"{name:<{width}}  {value}" for name, value in rows.items()]
        return [*table, "", self.comparison.line(), "", f"verdict: {verdict}"]

    def to_json(self) -> dict[str, object]:
        """JSON-ready form."""
        return {"verdict": "identical" if self.identical else "not identical", **dataclasses.asdict(self)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--prompt", default=_PROMPT, help="the user's turn of the chat (default: %(default)r)")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Run the job; 0 if the verdict is "identical"."""
    if not 1 <= args.max_new_tokens < MAX_TOKENS:
        raise InvalidArgumentError(
            f"handoff-vllm: --max-new-tokens must be at least 1 and below {MAX_TOKENS}, got {args.max_new_tokens}"
        )
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingPackageError(
            f"handoff-vllm: packages not installed: {', '.join(absent)}; make demo-vllm sets up an environment"
        )
    gguf = gguf_path("handoff-vllm")
    show: Callable[[str], None] = (lambda _: None) if args.json else _show
    show("(weights, float32; dequantised on the first run)\n")
    folder = checkpoint(gguf, cache_root() / "checkpoints")
    config = LlamaConfig.of(GGUFFile(gguf))
    show("(starting two vLLM servers on this CPU, about half a minute)\n\n")
    with Servers() as servers:
        ports = free_ports(5)
        prefill = servers.start_engine("prefill", folder, "standard", "kv_producer", ports[0], ports[1])
        decode = servers.start_engine("decode", folder, "shuffled", "kv_consumer", ports[2], ports[3])
        proxy = servers.start_proxy(prefill, decode, ports[4])
        servers.wait()
        report = _hand_off(prefill, decode, proxy, config, args.prompt, args.max_new_tokens, show)
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        show("\n".join(["", "", *report.lines(), ""]))
    return 0 if report.identical else 1


def _hand_off(
    prefill: str, decode: str, proxy: str, config: LlamaConfig, prompt: str, count: int, show: Callable[[str], None]
) -> Report:
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": prompt}], "add_generation_prompt": True}
    prompt_ids = client.ask(f"{prefill}/tokenize", chat)["tokens"]
    if len(prompt_ids) + count > MAX_TOKENS:
        raise InvalidArgumentError(
            f"handoff-vllm: --prompt and new tokens must be at most {MAX_TOKENS} tokens, "
            f"got {len(prompt_ids)} + {count}"
        )
    request = {"model": MODEL_NAME, "prompt": prompt_ids, "max_tokens": count, "temperature": 0}
    show(f"> {prompt.strip()}\n\n")
    token_ids: list[int] = []
    text, start, first = "", time.perf_counter(), 0.0
    for piece, ids in client.stream(proxy + COMPLETIONS, request):
        first = first or time.perf_counter() - start
        text += piece
        token_ids += ids
        show(piece)
    total = time.perf_counter() - start
    pages = -(-len(prompt_ids) // PAGE_SIZE)
    page = PageFormat("shuffled", "float32", config.num_kv_heads, PAGE_SIZE, config.head_dim)
    measured = _measured(decode, pages)
    show("\n\n(the same from one engine)\n")
    colocated = [token for _, ids in client.stream(prefill + COMPLETIONS, request) for token in ids]
    return Report(
        prompt_tokens=len(prompt_ids),
        expected_pages=pages,
        expected_bytes=pages * page.page_bytes * config.num_layers,
        pages_converted=int(measured.get("flashinfer:kv_pages_converted_total", 0)),
        bytes_converted=int(measured.get("flashinfer:kv_bytes_converted_total", 0)),
        bytes_moved=int(measured.get("vllm:nixl_bytes_transferred_sum", 0)),
        transfer_seconds=measured.get("vllm:nixl_xfer_time_seconds_sum", 0.0),
        convert_seconds=measured.get("flashinfer:kv_conversion_seconds_sum", 0.0),
        first_token_seconds=first,
        total_seconds=total,
        token_ids=token_ids,
        colocated_token_ids=colocated,
        text=text,
    )


def _measured(server: str, pages: int) -> dict[str, float]:
    """The decoder's counters, once they hold this many pages or have had their time."""
    end = time.monotonic() + _METRICS_S
    while True:
        samples = client.metrics(f"{server}/metrics")
        if samples.get("flashinfer:kv_pages_converted_total", 0) >= pages or time.monotonic() > end:
            return samples
        time.sleep(0.2)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
