# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Which backend would take a call, and why the others would not."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import flashinfer.ops
from flashinfer.core.checks import fail
from flashinfer.core.op import OPS, Op


def find_op(op: str | Op | Callable[..., Any]) -> Op:
    """The op of a name, or of the public function of that name.

    Raises
    ------
    InvalidArgumentError
        If there is none; the message lists all.
    """
    for module in pkgutil.iter_modules(flashinfer.ops.__path__):
        importlib.import_module(f"flashinfer.ops.{module.name}")
    if isinstance(op, Op):
        return op
    name = op if isinstance(op, str) else getattr(op, "explained_as", getattr(op, "__name__", None))
    if name is None:
        fail("explain", "op", f"one of {sorted(OPS)}, or a function of that name", f"a {type(op).__name__}")
    if name not in OPS:
        fail("explain", "op", f"one of {sorted(OPS)}, or a function of that name", repr(name))
    return OPS[name]


def explain(op: str | Callable[..., Any], /, *args: Any, backend: str = "auto", **kwargs: Any) -> dict[str, str | None]:
    """Say which backend would take a call, without running it.

    Parameters
    ----------
    op
        A public function such as `flashinfer.append_paged_kv_cache`, the `run` of a planned wrapper, or the name of an
        op.
    args, kwargs
        What the public function would be given; for a name, the op's arguments as its schema lists them.
    backend
        "auto", or the name of the only one to ask.

    Returns
    -------
    dict
        In order of preference, backend name to None ("takes the call") or to the sentence with which it declines.

    Raises
    ------
    InvalidArgumentError
        If the op is unknown, arguments are missing or of no name it knows, or they do not pass its check; also for a
        call that returns before it reaches the op, having nothing to do.
    BackendUnavailableError
        If the op does not have the backend asked for.
    """
    found = find_op(op)
    if isinstance(op, (str, Op)):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        schema = inspect.Signature([inspect.Parameter(name, kind) for name, _ in found.parameters])
        values = list(_bound(found, schema, args, kwargs).arguments.values())
        found.check_call(values)
        return found.reasons(values, backend)
    signature = inspect.signature(op)
    if "backend" in signature.parameters:
        kwargs = {**kwargs, "backend": backend}
    elif backend != "auto":
        fail("explain", "backend", "left out for a planned call, whose wrapper was made for one", repr(backend))
    _bound(found, signature, args, kwargs)
    with found.asked_only() as answers:
        op(*args, **kwargs)
    if not answers:
        fail("explain", "arguments", f"those of a call with something to do for {found.name}", "one that has nothing")
    return answers


def _bound(op: Op, signature: inspect.Signature, args: Any, kwargs: dict[str, Any]) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as e:
        names = ", ".join(name for name in signature.parameters if name != "backend")
        fail("explain", "arguments", f"those of {op.name}: {names}", str(e))
