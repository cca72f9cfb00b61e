# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Which backend would take a call, and why the others would not."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import flashinfer.ops
from flashinfer.core.errors import InvalidArgumentError
from flashinfer.core.op import OPS, Op


def find_op(op: str | Callable[..., Any]) -> Op:
    """The op of a name, or of the public function of that name.

    Raises
    ------
    InvalidArgumentError
        If there is none; the message lists all.
    """
    for module in pkgutil.iter_modules(flashinfer.ops.__path__):
        importlib.import_module(f"flashinfer.ops.{module.name}")
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in OPS:
        raise InvalidArgumentError(f"explain: op must be one of {sorted(OPS)}, got {name!r}")
    return OPS[name]


def explain(op: str | Callable[..., Any], *args: Any, backend: str = "auto", **kwargs: Any) -> dict[str, str | None]:
    """Say which backend would take a call, without running it.

    Parameters
    ----------
    op
        A public function such as `flashinfer.append_paged_kv_cache`, or the name of an op.
    args, kwargs
        What the public function would be given; for a name, the op's arguments in the order of its schema.
    backend
        "auto", or the name of the only one to ask.

    Returns
    -------
    dict
        In order of preference, backend name to None ("takes the call") or to the sentence with which it declines.

    Raises
    ------
    InvalidArgumentError
        If the op is unknown or the arguments do not pass its check.
    """
    found = find_op(op)
    if isinstance(op, str):
        found.check(*args)
        return found.reasons(args, backend)
    with found.asked_only() as answers:
        op(*args, backend=backend, **kwargs)
    return answers
