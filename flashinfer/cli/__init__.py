# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The command line, `python -m flashinfer`.

A command is a module with `add_arguments(parser)` and `run(args) -> int`, imported when it is called.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from flashinfer.core.errors import FlashInferError
from flashinfer.version import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "handoff": (
        "flashinfer.cli.handoff",
        "prefill in one process, decode in another, on unlike page formats",
    ),
    "handoff-vllm": ("flashinfer.cli.handoff_vllm", "the same with two vLLM servers and a proxy, without a GPU"),
    "explain": ("flashinfer.cli.explain", "say which backend takes a call, and why the others do not"),
    "layout": ("flashinfer.cli.layout", "show where a page format puts each element"),
    "show-config": ("flashinfer.cli.show_config", "versions, compilers, folders and variables in use"),
    "build": ("flashinfer.cli.build", "compile modules ahead of time"),
    "module-status": ("flashinfer.cli.module_status", "list the modules and which of them are built"),
    "clear-cache": ("flashinfer.cli.clear_cache", "delete the modules that were compiled on first use"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    try:
        return _run(argv)
    except FlashInferError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as a shell counts


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m flashinfer", description="FlashInfer for ROCm.")
    parser.add_argument("--version", action="version", version=f"flashinfer-rocm {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen = next((w for w in words if not w.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == chosen:
            importlib.import_module(module).add_arguments(subparser)
    args = parser.parse_args(words)
    status: int = importlib.import_module(COMMANDS[args.command][0]).run(args)
    return status
