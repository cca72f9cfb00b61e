# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Validation vocabulary: one place for the wording of a refusal."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from flashinfer.core.errors import InvalidArgumentError

# Looked up once: it is asked for each number of each call.
_is_compiling = torch.compiler.is_compiling

INDEX_DTYPES = (torch.int32, torch.int64)
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

Check = Callable[[str, str, Any], None]


def fail(op: str, argument: str, expected: str, got: object, remedy: str = "") -> NoReturn:
    """Raise `op: argument must be expected, got got; remedy`."""
    tail = f"; {remedy}" if remedy else ""
    raise InvalidArgumentError(f"{op}: {argument} must be {expected}, got {got}{tail}")


def describe(t: object) -> str:
    """Shape, dtype and device of a tensor, or the type of anything else."""
    if not isinstance(t, torch.Tensor):
        return type(t).__name__
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"


def _shown(value: object) -> str:
    """A scalar as it would be typed, the type of anything else."""
    scalar = value is None or isinstance(value, (str, numbers.Number))
    return repr(value)[:80] if scalar else type(value).__name__


def require_tensor(op: str, name: str, t: object) -> None:
    """Refuse what is not a tensor, and nested tensors, which have no strides."""
    if not isinstance(t, torch.Tensor):
        fail(op, name, "a tensor", describe(t))
    if t.is_nested:
        fail(op, name, "a tensor that is not nested", "a nested one", f"pass {name}.values() or a padded tensor")


def integer(op: str, name: str, value: object, least: int, most: int) -> None:
    """Refuse anything but an integer from `least` to `most`; True is none, NumPy's are."""
    # What nearly all are: every call checks a dozen numbers.
    if type(value) is int and not _is_compiling() and least <= value <= most:
        return
    if isinstance(value, torch.SymInt):
        return
    if not isinstance(value, (int, numbers.Integral)) or isinstance(value, bool):
        fail(op, name, "an integer", _shown(value))
    # The compiler traces this, and a bound on a size that is not known yet would stop it.
    if not _is_compiling() and not least <= int(value) <= most:
        fail(op, name, f"an integer from {least} to {most}", value)


def number(op: str, name: str, value: object) -> None:
    """Refuse anything but a finite real number."""
    if type(value) is float and not _is_compiling() and math.isfinite(value):
        return
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return
    if not isinstance(value, (float, int, numbers.Real)) or isinstance(value, bool):
        fail(op, name, "a number", _shown(value))
    if not _is_compiling() and not _is_finite(value):
        fail(op, name, "finite", _shown(value))


def _is_finite(value: numbers.Real | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _tensors(op: str, name: str, value: object) -> None:
    if not isinstance(value, (list, tuple)):
        fail(op, name, "a list of tensors", _shown(value))
    for i, t in enumerate(value):
        require_tensor(op, f"{name}[{i}]", t)


def _int64(op: str, name: str, value: object) -> None:
    integer(op, name, value, -INT64_MAX, INT64_MAX)


def _boolean(op: str, name: str, value: object) -> None:
    if not isinstance(value, (bool, torch.SymBool)):
        fail(op, name, "True or False", _shown(value))


def _string(op: str, name: str, value: object) -> None:
    if not isinstance(value, str):
        fail(op, name, "a string", _shown(value))


def _anything(op: str, name: str, value: object) -> None:
    pass


_OF_KIND: dict[str, Check] = {
    "Tensor": require_tensor,
    "List[Tensor]": _tensors,
    "int": _int64,
    "float": number,
    "bool": _boolean,
    "str": _string,
}


def of_kind(kind: str) -> tuple[bool, Check]:
    """Whether None passes for a schema's `kind`, a type as torch prints it, and what refuses other values.

    The latter is called with the op, the argument's name, and the value.
    """
    if kind.startswith("Optional["):
        return True, of_kind(kind[len("Optional[") : -1])[1]
    return False, _OF_KIND.get(kind, _anything)


def _is_fake(t: torch.Tensor) -> bool:
    # Imported by then in a process that has such tensors, and not wanted in one that has none.
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)


def real_device(op: str, t: torch.Tensor) -> None:
    """Refuse tensors without memory. Fake ones pass: they stand for tensors that have some."""
    if t.is_meta and not _is_fake(t):
        fail(op, "tensors", "on a CPU or GPU", t.device)


def writable(op: str, written: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse to write what autograd watches, and what can be seen to be one memory under two names."""
    for name, t in written:
        if t.requires_grad and torch.is_grad_enabled():
            fail(
                op,
                name,
                "without requires_grad, as it is written behind autograd's back",
                "requires_grad=True",
                f"pass {name}.detach() or call under torch.no_grad()",
            )
        strides = t.stride()
        if 0 in strides and any(step == 0 and size > 1 for size, step in zip(t.shape, strides, strict=True)):
            fail(op, name, "of elements that each have memory of their own", f"{describe(t)} of stride {strides}")
    places = [(name, _place(t)) for name, t in written if t.numel()]
    for (name, place), (other, another) in itertools.combinations(places, 2):
        if place == another:
            fail(op, other, f"of memory of its own, not that of {name}", f"{other}.data_ptr() == {name}.data_ptr()")


def apart(op: str, name: str, t: torch.Tensor, other: str, written: torch.Tensor) -> None:
    """Refuse `t`, which is read, where it may lie in the memory of `written`, which has as many dimensions.

    Views of one buffer side by side pass, however their elements alternate: as far as they repeat at one distance. The
    rule stands a second time in csrc_rocm/shims/apart.h.
    """
    if not t.numel() or not written.numel():
        return
    starts = _place(t), _place(written)
    if starts[0][0] != starts[1][0]:
        return
    at, to = starts[0][1], starts[1][1]
    if at + _extent(t, 0) <= to or to + _extent(written, 0) <= at:
        return
    for dim in range(t.dim() - 1):
        period, *others = [_step(u, dim) for u in (t, written) if u.size(dim) > 1] or [0]
        outer = [_step(u, d) for u in (t, written) for d in range(dim) if u.size(d) > 1]
        if not period or any(step != period for step in others) or any(step % period for step in outer):
            continue
        sizes = _extent(t, dim + 1), _extent(written, dim + 1)
        if max(sizes) <= period and (to - at) % period >= sizes[0] and (at - to) % period >= sizes[1]:
            return
    fail(op, name, f"outside of {other}, which is written while it is read", "memory that both have", "pass a copy")


def is_same_view(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have every element at one place."""
    strides = zip(t.shape, t.stride(), other.stride(), strict=True)
    return _place(t) == _place(other) and all(a == b for size, a, b in strides if size > 1)


def _extent(t: torch.Tensor, dim: int) -> int:
    """Bytes from the first to the last element of the dimensions from `dim` on."""
    sizes, strides = t.shape[dim:], t.stride()[dim:]
    return (1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))) * t.element_size()


def _step(t: torch.Tensor, dim: int) -> int:
    return t.stride(dim) * t.element_size()


def _place(t: torch.Tensor) -> tuple[object, Any]:
    """A memory, and where in it a tensor begins, in bytes; all that is real is one memory."""
    # Fake ones are of a class of their own.
    if t.is_meta or (type(t) is not torch.Tensor and _is_fake(t)):
        return t.untyped_storage()._cdata, t.storage_offset() * t.element_size()
    return None, t.data_ptr()


def index_vector(op: str, name: str, t: torch.Tensor, device: torch.device) -> None:
    """Refuse anything but a contiguous 1-D int32 or int64 tensor on `device`."""
    require_tensor(op, name, t)
    if t.dim() != 1:
        fail(op, name, "1-D", describe(t))
    if t.dtype not in INDEX_DTYPES:
        fail(op, name, "int32 or int64", describe(t), f"pass {name}.int()")
    if t.device != device:
        fail(op, name, f"on {device}", t.device, f"pass {name}.to({str(device)!r})")
    if not t.is_contiguous():
        fail(op, name, "contiguous", f"stride {t.stride()}", f"pass {name}.contiguous()")


def refuse_extras(
    where: str, flags: dict[str, bool], optional: dict[str, object], *defaulted: dict[str, tuple[object, object]]
) -> None:
    """Refuse by name every argument that asks for what is not there: a flag that is set, what is not None, and what
    is not its default, given as (value, default)."""
    for name, flag in flags.items():
        if flag:
            fail(where, name, "False, as it is not supported", flag)
    for name, value in optional.items():
        if value is not None:
            fail(where, name, "None, as it is not supported", type(value).__name__)
    for group in defaulted:
        for name, (value, default) in group.items():
            if value != default:
                fail(where, name, f"{default!r}, as nothing else is supported", repr(value))
