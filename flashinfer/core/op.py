# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The `Op`: one schema, one check, one fake, and an ordered tuple of backends.

An eager call runs check, selection and backend in place. Under `torch.compile`, or under any dispatch mode, the
call goes through `torch.ops.flashinfer.<name>`, so that an op is exactly one node of a graph.

A backend is a module `flashinfer.backends.<backend>.<family>` with two functions an op: `why_not_<op>(*args)`
returns None or a sentence, `<op>(*args)` does the work. Both take the schema's arguments without `backend`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

import torch

from flashinfer.core import env
from flashinfer.core.errors import BackendUnavailableError, InvalidArgumentError

logger = logging.getLogger("flashinfer")

LIBRARY = torch.library.Library("flashinfer", "FRAGMENT")
OPS: dict[str, Op] = {}

_asked_only: ContextVar[dict[str, str | None] | None] = ContextVar("flashinfer_asked_only", default=None)
_override: ContextVar[str | None] = ContextVar("flashinfer_backend", default=None)

_self_checking: set[Callable[..., Any]] = set()
# What a self-checking backend, or a `why_not` that met arguments of the wrong kind, may raise. The check then runs to
# say it in the package's words; if it finds nothing wrong, the exception goes on.
_OBJECTIONS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)

Run = TypeVar("Run", bound=Callable[..., Any])


def checks_arguments(run: Run) -> Run:
    """Mark a backend function that refuses by itself, with any exception, all that the op's check would refuse.

    For ops so short that checks in Python would cost more than the work: the check runs only after a refusal.
    """
    _self_checking.add(run)
    return run


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the calls inside with one backend, as if each were given `backend=name`.

    A call that names a backend itself keeps it.

    Parameters
    ----------
    name
        A backend, or "auto".
    """
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


class Op:
    """An operation of the package.

    Parameters
    ----------
    name
        The word by which every layer calls it.
    family
        The module name under each backend package.
    schema
        Arguments and results in torch's schema language, with `(a!)` on whatever is written; a last argument
        `backend` is added. No defaults: torch drops trailing arguments that equal them.
    check
        Raises `InvalidArgumentError`; looks at shapes, strides, dtypes and devices only, so that it also holds for
        fake tensors.
    fake
        Result for fake tensors; None for an op that only writes its arguments.
    backends
        Names in order of preference, with the measurement behind the order in a comment beside the op.
    """

    def __init__(
        self,
        name: str,
        family: str,
        schema: str,
        *,
        check: Callable[..., None],
        backends: tuple[str, ...],
        fake: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name
        self.family = family
        self.backends = backends
        self.check = check
        self.fake = fake
        self._loaded: dict[str, tuple[Callable[..., str | None], Callable[..., Any]]] = {}
        head, arrow, result = schema.partition(" -> ")
        LIBRARY.define(f"{name}({head}, str backend){arrow}{result}")
        LIBRARY.impl(name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flashinfer::{name}", self._run_fake, lib=LIBRARY)
        self._torch_op = getattr(torch.ops.flashinfer, name).default
        OPS[name] = self

    @property
    def signature(self) -> str:
        """The schema as torch prints it."""
        return str(self._torch_op._schema)

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """Name and type of each argument, without `backend`."""
        return [(a.name, str(a.type)) for a in self._torch_op._schema.arguments[:-1]]

    def __call__(self, *args: Any, backend: str = "auto") -> Any:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self._torch_op(*args, backend)
        return self._run(*args, backend)

    def _run(self, *args_and_backend: Any) -> Any:
        *args, backend = args_and_backend
        answers = _asked_only.get()
        if answers is not None:
            self.check(*args)
            answers.update(self.reasons(args, backend))
            return None
        try:
            run = self.select(args, backend)
            if run in _self_checking:
                return run(*args)
        except _OBJECTIONS:
            self.check(*args)
            raise
        self.check(*args)
        return run(*args)

    def _run_fake(self, *args_and_backend: Any) -> Any:
        *args, _ = args_and_backend
        self.check(*args)
        return None if self.fake is None else self.fake(*args)

    def functions(self, backend: str) -> tuple[Callable[..., str | None], Callable[..., Any]]:
        """Return `(why_not, run)` of one backend, importing its module on first use."""
        found = self._loaded.get(backend)
        if found is None:
            module: ModuleType = importlib.import_module(f"flashinfer.backends.{backend}.{self.family}")
            found = (getattr(module, f"why_not_{self.name}"), getattr(module, self.name))
            self._loaded[backend] = found
        return found

    def select(self, args: Any, backend: str) -> Callable[..., Any]:
        """Return the function of the backend that takes the call.

        Raises
        ------
        BackendUnavailableError
            If none does, or the one asked for does not.
        """
        for name in self.wanted(backend):
            why_not, run = self.functions(name)
            if why_not(*args) is None:
                return run
        lines = "\n".join(f"  {name}: {reason}" for name, reason in self.reasons(args, backend).items())
        raise BackendUnavailableError(f"{self.name}: no backend takes this call\n{lines}\n  inputs: {_inputs(args)}")

    def reasons(self, args: Any, backend: str) -> dict[str, str | None]:
        """Every wanted backend with its sentence, or None if it takes the call."""
        return {name: self.functions(name)[0](*args) for name in self.wanted(backend)}

    @contextlib.contextmanager
    def asked_only(self) -> Iterator[dict[str, str | None]]:
        """Inside, eager calls are checked and answered with `reasons`, and not run."""
        answers: dict[str, str | None] = {}
        token = _asked_only.set(answers)
        try:
            yield answers
        finally:
            _asked_only.reset(token)

    def wanted(self, backend: str) -> tuple[str, ...]:
        """Backends to try: all of them for "auto", else the one that the call, the context or the variable names."""
        if backend == "auto":
            backend = _override.get() or env.backend.at_first_use
        if backend == "auto":
            return self.backends
        if backend not in self.backends:
            raise InvalidArgumentError(
                f"{self.name}: backend must be one of {('auto', *self.backends)}, got {backend!r}"
            )
        return (backend,)


def _inputs(args: Any) -> str:
    from flashinfer.core.checks import describe

    return ", ".join(describe(a) if isinstance(a, torch.Tensor) else repr(a)[:80] for a in args)
