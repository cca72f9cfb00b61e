# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The `Op`: one schema, one check, one fake, and an ordered tuple of backends.

An eager call runs check, selection and backend in place. Under `torch.compile`, or under any dispatch mode, the
call goes through `torch.ops.flashinfer.<name>`, so that an op is exactly one node of a graph.

A backend is a module `flashinfer.backends.<backend>.<family>` with two functions an op: `why_not_<op>(*args)`
returns None or a sentence, `<op>(*args)` does the work. Both take the schema's arguments without `backend`. It may have
a third, `ready_<op>(*args)`, which gets ready what the call needs (compiles, say) and raises where that fails.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

import torch

from flashinfer.core import checks, env
from flashinfer.core.errors import BackendUnavailableError, BuildError, InvalidArgumentError, LaunchError

logger = logging.getLogger("flashinfer")

LIBRARY = torch.library.Library("flashinfer", "FRAGMENT")
OPS: dict[str, Op] = {}

# Before the backend of a call that is a step inside of another, as a wrapper's fetch of keys is: few ops have the same
# backends, so a name that is not one of a step's own leaves it the choice.
STEP = "step:"

_asked_only: ContextVar[dict[str, str | None] | None] = ContextVar("flashinfer_asked_only", default=None)
_override: ContextVar[str | None] = ContextVar("flashinfer_backend", default=None)

# Looked up once: every eager call asks both.
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack

_self_checking: set[Callable[..., Any]] = set()
# What a self-checking backend, or a `why_not` that met arguments of the wrong kind, may raise. The check then runs to
# say it in the package's words; if it finds nothing wrong, the exception goes on.
_OBJECTIONS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)

Run = TypeVar("Run", bound=Callable[..., Any])


def checks_arguments(run: Run) -> Run:
    """Mark a backend function that refuses by itself, with any exception, all that the op's check would refuse.

    For ops so short that checks in Python would cost more than the work: the check runs only after a refusal.
    """
    _self_checking.add(run)
    return run


def known_backends() -> list[str]:
    """Every backend that some op has."""
    package = importlib.import_module("flashinfer.backends")
    found = {module.name for module in pkgutil.iter_modules(package.__path__)}
    return sorted(found.union(*(op.backends for op in OPS.values())))


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the calls inside with one backend, as if each were given `backend=name`.

    A call that names a backend itself keeps it, and steps of a wrapper that do not have it, such as the fetch of pages
    around attention, take one of their own. Inside a compiled function only `backend=` works: the compiler does
    not trace this context.

    Parameters
    ----------
    name
        A backend, or "auto".

    Raises
    ------
    InvalidArgumentError
        If `name` is not a name; one that no op knows is refused by the calls inside.
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"use_backend: name must be a backend's name or 'auto', got {name!r}")
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def explained_as(op: str) -> Callable[[Run], Run]:
    """Mark the `run` of a wrapper as calls of an op: `flashinfer.explain(wrapper.run, ...)` then speaks of that."""

    def mark(function: Run) -> Run:
        function.__dict__["explained_as"] = op
        return function

    return mark


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
        self._getting_ready: dict[str, Callable[..., None]] = {}
        self._told: set[str] = set()
        head, arrow, result = schema.partition(" -> ")
        LIBRARY.define(f"{name}({head}, str backend){arrow}{result}")
        LIBRARY.impl(name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flashinfer::{name}", self._run_fake, lib=LIBRARY)
        self._torch_op = getattr(torch.ops.flashinfer, name).default
        marks = [a.alias_info for a in self._torch_op._schema.arguments[:-1]]
        self._written = [i for i, mark in enumerate(marks) if mark is not None and mark.is_write]
        self._names = [name for name, _ in self.parameters]
        self._kinds = [checks.of_kind(kind) for _, kind in self.parameters]
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
        if _is_compiling():
            return self._torch_op(*args, backend)
        if _dispatch_modes():
            # Before torch says the same in words of its own.
            self._check_kinds(args)
            return self._torch_op(*args, backend)
        return self._run_eager(args, backend)

    def check_call(self, args: Any) -> None:
        """Raise for all that is wrong with a call: kinds of arguments, then the op's own check, then memory."""
        self._check_kinds(args)
        self.check(*args)
        # All are on one device by now.
        for t in _flat(args):
            if isinstance(t, torch.Tensor):
                checks.real_device(self.name, t)
                break
        marked = ((self._names[i], args[i]) for i in self._written)
        # A list of tensors is long, and looked at by the op's own check.
        checks.writable(self.name, [(name, t) for name, t in marked if isinstance(t, torch.Tensor)])

    def _check_kinds(self, args: Any) -> None:
        for name, (is_optional, check), value in zip(self._names, self._kinds, args, strict=True):
            if value is not None or not is_optional:
                check(self.name, name, value)

    def _run(self, *args_and_backend: Any) -> Any:
        return self._run_eager(args_and_backend[:-1], args_and_backend[-1])

    def _run_eager(self, args: tuple[Any, ...], backend: str) -> Any:
        answers = _asked_only.get()
        if answers is not None:
            self.check_call(args)
            if not _is_step(backend):
                # A backend takes what is asked about if it takes all calls of it.
                answers.update({name: answers.get(name) or r for name, r in self.reasons(args, backend).items()})
            return None
        try:
            run = self.select(args, backend)
            if run in _self_checking:
                return run(*args)
        except _OBJECTIONS as e:
            self.check_call(args)
            _tell_launch(e)
            raise
        self.check_call(args)
        try:
            return run(*args)
        except RuntimeError as e:
            _tell_launch(e)
            raise

    def _run_fake(self, *args_and_backend: Any) -> Any:
        *args, _ = args_and_backend
        self.check_call(args)
        return None if self.fake is None else self.fake(*args)

    def functions(self, backend: str) -> tuple[Callable[..., str | None], Callable[..., Any]]:
        """Return `(why_not, run)` of one backend, importing its module on first use."""
        found = self._loaded.get(backend)
        if found is None:
            module: ModuleType = importlib.import_module(f"flashinfer.backends.{backend}.{self.family}")
            found = (getattr(module, f"why_not_{self.name}"), getattr(module, self.name))
            ready = getattr(module, f"ready_{self.name}", None)
            if ready is not None:
                self._getting_ready[backend] = ready
            self._loaded[backend] = found
        return found

    def select(self, args: Any, backend: str) -> Callable[..., Any]:
        """Return the function of the backend that takes the call.

        Where there is a choice, a backend that could take the call but cannot be made ready is passed over: by then its
        `why_not` knows. That compilation is disabled (`MissingJITCacheError`) passes over nothing.

        Raises
        ------
        BackendUnavailableError
            If none does, or the one asked for does not.
        BuildError
            If the one asked for does not compile.
        """
        wanted = self.wanted(backend)
        passed_over = ""
        for name in wanted:
            why_not, run = self._loaded.get(name) or self.functions(name)
            reason = why_not(*args)
            if reason is None and (name not in self._getting_ready or self._ready(name, args, len(wanted) > 1)):
                if wanted is self.backends and name + passed_over not in self._told:
                    self._tell(name, passed_over)
                return run
            passed_over += f"; not {name}: {reason or self.functions(name)[0](*args)}"
        lines = "\n".join(f"  {name}: {reason}" for name, reason in self.reasons(args, backend).items())
        raise BackendUnavailableError(f"{self.name}: no backend takes this call\n{lines}\n  inputs: {_inputs(args)}")

    def _tell(self, name: str, passed_over: str) -> None:
        """Say once that "auto" takes a backend, and why not one before it."""
        # The usual choice is not looked at again, whether or not anybody listened; others cost more than asking does.
        if not passed_over or logger.isEnabledFor(logging.DEBUG):
            self._told.add(name + passed_over)
        logger.debug("%s: auto takes %s%s", self.name, name, passed_over)

    def _ready(self, name: str, args: Any, may_fail: bool) -> bool:
        try:
            self._getting_ready[name](*args)
        except (BackendUnavailableError, BuildError):
            if may_fail:
                return False
            raise
        return True

    def reasons(self, args: Any, backend: str) -> dict[str, str | None]:
        """Every wanted backend with its sentence, or None if it takes the call."""
        return {name: self.functions(name)[0](*args) for name in self.wanted(backend)}

    def bind(self, args: Any, backend: str) -> Callable[..., None] | None:
        """Check and select once for many calls that differ little.

        A backend may have a function `bind_<op>(*args)` that returns a cheaper way to repeat a call, which takes only
        what may change; that function says what.

        Returns
        -------
        callable or None
            None if the backend that takes the call has no such thing, or another is to be asked each time.

        Raises
        ------
        BackendUnavailableError, InvalidArgumentError
            As a call does.
        """
        self.check_call(args)
        module = importlib.import_module(self.select(args, backend).__module__)
        bind = getattr(module, f"bind_{self.name}", None)
        if bind is None:
            return None
        run = bind(*args)

        def repeat(*changed: Any) -> None:
            try:
                run(*changed)
            except RuntimeError as e:
                _tell_launch(e)
                raise

        return repeat

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
        """Backends to try: all of them for "auto", else the one that the call, the context or the variable names.

        A call marked with `STEP` tries all of them also where the name is none of its own.
        """
        source, step = "backend", _is_step(backend)
        backend = backend.removeprefix(STEP) if step else backend
        if backend == "auto":
            override = _override.get()
            if override is None:
                backend, source = env.backend.at_first_use, env.backend.name
            else:
                backend, source = override, "backend of use_backend"
        if backend == "auto":
            return self.backends
        if backend in self.backends:
            return (backend,)
        if step:
            return self.backends
        if backend in known_backends():
            raise BackendUnavailableError(
                f"{self.name}: no backend takes this call\n"
                f"  {backend}: this op has no such backend ({source}); it has {', '.join(self.backends)}"
            )
        names = self.backends if source == "backend" else known_backends()
        raise InvalidArgumentError(f"{self.name}: {source} must be one of {('auto', *names)}, got {backend!r}")


def _is_step(backend: object) -> bool:
    return isinstance(backend, str) and backend.startswith(STEP)


def _flat(args: Any) -> Iterator[Any]:
    """The arguments, and what is in those that are lists."""
    for a in args:
        yield from a if isinstance(a, (list, tuple)) else (a,)


def _tell_launch(error: Exception) -> None:
    """Raise what a shim says of a launch that the runtime refused as a `LaunchError`."""
    text = str(error).partition("\n")[0]
    if "launch failed with code" in text:
        raise LaunchError(text) from error


def _inputs(args: Any) -> str:
    return ", ".join(checks.describe(a) if isinstance(a, torch.Tensor) else repr(a)[:80] for a in args)
