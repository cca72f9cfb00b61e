# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`explain`: which backend takes a call, and why the others do not, without running it.

  python -m flashinfer explain
  python -m flashinfer explain get_seq_lens
  python -m flashinfer explain get_seq_lens kv_indptr=int32[4] kv_last_page_len=int32[3] page_size=16 seq_lens=int32[3]
  python -m flashinfer explain convert_kv_pages planes=bfloat16[8,16384]*4 planes_per_layer=2 block_ids=int32[2] \\
      src=standard src_heads=8 src_page_size=16 dst=shuffled dst_heads=8 dst_page_size=16 head_dim=128 recode=0 \\
      --device cuda
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashinfer.core.checks import fail
from flashinfer.core.op import OPS, Op
from flashinfer.selection import explain, find_op

_TENSOR = re.compile(r"(?P<dtype>[a-z]+[a-z0-9_]*)\[(?P<shape>[0-9, ]*)\](\*(?P<count>\d+))?")

_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}
_PARSERS: dict[str, Callable[[str], object]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda word: _BOOLEANS[word.lower()],
}
# Layers times planes, with room: each is made.
_MOST_TENSORS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("op", nargs="?", help="an op; without one, all are listed")
    parser.add_argument(
        "arguments", nargs="*", help="name=dtype[shape], name=dtype[shape]*count for a list, name=value"
    )
    parser.add_argument("--device", default="cpu", help="where the tensors are (default %(default)s)")
    parser.add_argument("--backend", default="auto", help="ask for one backend (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the answer; 1 if no backend takes the call."""
    if args.op is None:
        find_op("convert_kv_pages")  # declares every op
        for name in sorted(OPS):
            print(f"{name:<30} {' > '.join(OPS[name].backends)}")
        return 0
    op = find_op(args.op)
    if not args.arguments:
        print(f"{op.signature}\nbackends: {' > '.join(op.backends)}\nGive the arguments for an answer about one call.")
        return 0
    device = _device(args.device)
    # Tensors without memory: any size, and a device that need not be there.
    with FakeTensorMode():
        answers = explain(op.name, *_arguments(op, args.arguments, device), backend=args.backend)
    for backend, reason in answers.items():
        print(f"{backend:<12} {'takes the call' if reason is None else reason}")
    return 0 if None in answers.values() else 1


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        fail("explain", "--device", "cpu or cuda, which is also the name of AMD GPUs", repr(text))
    return device


def _arguments(op: Op, words: list[str], device: torch.device) -> list[object]:
    """Values in the order of the schema."""
    given = dict(word.partition("=")[::2] for word in words)
    wanted = dict(op.parameters)
    names = [word.partition("=")[0] for word in words]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        fail("explain", "arguments", "given once each", f"{', '.join(twice)} several times")
    if set(given) != set(wanted):
        fail("explain", "arguments", f"exactly {', '.join(wanted)}", ", ".join(given))
    return [_value(name, kind, given[name], device) for name, kind in wanted.items()]


def _value(name: str, kind: str, text: str, device: torch.device) -> object:
    if kind.startswith("Optional["):
        if text.lower() == "none":
            return None
        kind = kind.removeprefix("Optional[").removesuffix("]")
    if kind.startswith("Optional["):
        return None if text == "none" else _value(name, kind[len("Optional[") : -1], text, device)
    if kind in ("Tensor", "List[Tensor]"):
        found = _TENSOR.fullmatch(text)
        dtype = getattr(torch, found["dtype"], None) if found else None
        if found is None or not isinstance(dtype, torch.dtype):
            fail("explain", name, "a tensor such as bfloat16[4,8,128]", repr(text))
        shape = [int(size) for size in found["shape"].split(",") if size.strip()]
        count = int(found["count"] or 1)
        if count > _MOST_TENSORS or (found["count"] and kind == "Tensor"):
            fail("explain", name, f"one tensor, or at most {_MOST_TENSORS} of a list", repr(text))
        try:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
        except (RuntimeError, TypeError, OverflowError):
            fail("explain", name, "of a size that 64 bits can count", repr(text))
        return tensors if kind == "List[Tensor]" else tensors[0]
    try:
        return _PARSERS[kind](text)
    except (KeyError, ValueError):
        fail("explain", name, f"of type {kind}", repr(text))
