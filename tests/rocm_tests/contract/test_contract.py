# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What every op owes, whichever it is: one spelling in every layer, a truthful schema, and one way to say no."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer.core import op as core
from flashinfer.core.op import OPS
from flashinfer.testing.compare import assert_equal_bits
from rocm_tests.contract.bad import BAD
from rocm_tests.contract.samples import CASES, SAMPLES, Sample, sample, takers, tensors, written

ROUTES = [(name, variant, backend) for name, variant in CASES for backend in takers(name, sample(name, 3, variant)[1])]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_every_op_is_covered() -> None:
    assert set(SAMPLES) == set(OPS), "each op has samples in contract/samples.py"
    assert {name for name, *_ in BAD} == set(OPS), "each op has bad arguments in contract/bad.py"
    assert set(OPS) <= set(flashinfer._EXPORTS), "each op is public under its own name"


@pytest.mark.parametrize("name", SAMPLES)
def test_one_signature_in_every_layer(name: str) -> None:
    op = OPS[name]
    schema = [a.name for a in op._torch_op._schema.arguments]
    assert schema.pop() == "backend"
    assert parameters(op.check) == schema
    if op.fake is not None:
        assert parameters(op.fake) == schema
    assert list(sample(name, 2)[1].arguments) == schema
    for backend in op.backends:
        why_not, run = op.functions(backend)
        assert (why_not.__name__, run.__name__) == (f"why_not_{name}", name)
        assert parameters(run) == schema, backend
        named = list(inspect.signature(why_not).parameters.values())
        # What it does not look at, it may take as *args.
        complete = named[-1].kind is not inspect.Parameter.VAR_POSITIONAL
        expected = schema if complete else schema[: len(named) - 1]
        assert [p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD] == expected, backend


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_written_is_marked_and_nothing_aliases(name: str) -> None:
    """vllm-project/flash-attention#148: distinct letters for distinct arguments."""
    schema = OPS[name]._torch_op._schema
    marks = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    assert written(OPS[name])
    assert all(mark.is_write for mark in marks)
    letters = re.findall(r"\((\w)!\)", str(schema))
    assert len(letters) == len(set(letters)) == len(marks)
    assert not any(r.alias_info for r in schema.returns)
    # Eager calls would otherwise mean something else than compiled ones: torch drops arguments equal to a default.
    assert not any(a.has_default_value() for a in schema.arguments)


@pytest.mark.parametrize("name", sorted(n for n in flashinfer._EXPORTS if inspect.isfunction(getattr(flashinfer, n))))
def test_a_public_function_documents_every_parameter(name: str) -> None:
    function = getattr(flashinfer, name)
    text = inspect.getdoc(function) or ""
    summary, _, rest = text.partition("\n\n")
    assert summary, f"{name} has no summary"
    assert "\n" not in summary, f"{name}: the summary is one line"
    if parameters(function) == []:
        return
    sections = dict(re.findall(r"(?m)^(\w+)\n-{3,}\n((?:(?!^\w+\n-{3,}\n).*\n?)*)", rest))
    listed = {
        word.strip()
        for line in re.findall(r"(?m)^(\w[\w, ]*)$", sections.get("Parameters", ""))
        for word in line.split(",")
    }
    assert set(parameters(function)) <= listed, f"{name} documents {sorted(listed)}"
    if name in OPS:
        assert "InvalidArgumentError" in sections["Raises"]
        assert "backend" in listed


@pytest.mark.parametrize(("name", "variant", "backend"), ROUTES)
def test_opcheck(name: str, variant: int, backend: str) -> None:
    """What the compiler sees is the same for all backends: they share its part of the check."""
    op, call = sample(name, 3, variant)
    compiler = ("test_autograd_registration", "test_aot_dispatch_dynamic") if backend == takers(name, call)[0] else ()
    utils = ("test_schema", "test_faketensor", *compiler)
    torch.library.opcheck(op._torch_op, (*call.arguments.values(), backend), test_utils=utils)


@pytest.mark.parametrize(("name", "variant", "backend"), ROUTES)
def test_opcheck_of_an_empty_batch(name: str, variant: int, backend: str) -> None:
    op, call = sample(name, 0, variant)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(op._torch_op, (*call.arguments.values(), backend), test_utils=utils)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_backends_write_the_same_bits_and_only_what_is_marked(name: str, variant: int) -> None:
    op, original = sample(name, 3, variant)
    results = []
    for backend in takers(name, original):
        call = original.clone()
        assert op(*call.arguments.values(), backend=backend) is None
        for argument, value in call.arguments.items():
            if argument in call.scratch:
                continue
            changed = [
                not torch.equal(got, old)
                for got, old in zip(tensors(value), tensors(original.arguments[argument]), strict=True)
            ]
            assert any(changed) == (argument in written(op)), argument
        results.append(call)
    for result in results[1:]:
        for got, want in zip(result.arguments.values(), results[0].arguments.values(), strict=True):
            for g, w in zip(tensors(got), tensors(want), strict=True):
                assert_equal_bits(g.contiguous(), w.contiguous())


def compiled_equals_eager(name: str, variant: int, sizes: tuple[int, ...], backend: str) -> int:
    """Compile for the first size, run on all, and compare results and written arguments; returns the compilations."""
    op = OPS[name]
    marked = written(op)
    names = list(sample(name, 2, variant)[1].arguments)
    counter = CompileCounterWithBackend(backend)

    def call_and_read(*args: Any) -> list[torch.Tensor]:
        op(*args)
        return [t + 1 for argument in marked for t in tensors(args[names.index(argument)])]

    torch._dynamo.reset()
    compiled = torch.compile(call_and_read, fullgraph=True, backend=counter)
    for n in sizes:
        original = sample(name, n, variant)[1]
        eager, other = original.clone(), original.clone()
        for argument in original.dynamic:
            torch._dynamo.mark_dynamic(other.arguments[argument], 0)
        expected = call_and_read(*eager.arguments.values())
        for got, want in zip(compiled(*other.arguments.values()), expected, strict=True):
            assert_equal_bits(got, want)
        for argument in marked:
            pairs = zip(*(tensors(c.arguments[argument]) for c in (other, eager)), strict=True)
            for got, want in pairs:
                assert_equal_bits(got.contiguous(), want.contiguous(), name=f"{argument} after the compiled call")
    return counter.frame_count


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("name", "variant", "backend"), [r for r in ROUTES if r[2] in ("native", "reference")])
def test_autograd_hears_of_what_is_written(name: str, variant: int, backend: str) -> None:
    """A backward pass that saved what is written must refuse, as after any operation in place."""
    op, call = sample(name, 3, variant)
    into = [t for argument in written(op) for t in tensors(call.arguments[argument]) if t.numel()]
    before = [(t._version, t.clone()) for t in into]
    op(*call.arguments.values(), backend=backend)
    for t, (version, old) in zip(into, before, strict=True):
        # What is marked may be left alone, as an LSE that nobody asked for.
        assert t._version > version or bits(t) == bits(old)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_compiled_once_for_every_batch_size(name: str, variant: int) -> None:
    """hao-ai-lab/FastVideo#1647 and kin: one graph without breaks, writes visible, and 7 requests as good as 3."""
    assert compiled_equals_eager(name, variant, (3, 7), "aot_eager") == 1


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_results_of_fake_tensors_are_like_the_real_ones(name: str, variant: int) -> None:
    op, call = sample(name, 3, variant)
    with FakeTensorMode() as mode:

        def fake(a: Any) -> Any:
            if isinstance(a, list):
                return [fake(t) for t in a]
            return mode.from_tensor(a) if isinstance(a, torch.Tensor) else a

        assert op(*map(fake, call.arguments.values())) is None


def public_results(device_is_fake: bool) -> list[torch.Tensor]:
    """What the public functions that allocate return for the samples."""
    with FakeTensorMode(allow_non_fake_inputs=True) if device_is_fake else torch.no_grad():
        found: list[torch.Tensor] = []
        indptr, lens = torch.tensor([0, 2, 5]), torch.tensor([4, 9])
        found += flashinfer.get_batch_indices_positions(indptr, lens, 7)
        found += [flashinfer.get_seq_lens(indptr, torch.tensor([1, 2]), 16)]
        for dtype in (torch.float16, torch.float32):
            q, pool = torch.zeros(5, 4, 64, dtype=dtype)[:, ::2, :32], torch.zeros(9, 2, 16, 2, 32, dtype=dtype)
            table = indptr, indptr, torch.zeros(5, dtype=torch.int32), torch.tensor([1, 2])
            found += flashinfer.paged_attention(q, pool, *table, return_lse=True)
            caches, options = pool[:, 0, :, 0].split([24, 8], dim=-1), {"causal": True, "sm_scale": 1.0}
            mla_table = indptr, indptr, torch.zeros(5, dtype=torch.int32), indptr.diff() * 16
            found += flashinfer.mla_paged_attention(
                *q.split([24, 8], dim=-1), *caches, *mla_table, return_lse=True, **options
            )
        return found


def test_fake_results_of_public_functions_are_like_the_real_ones() -> None:
    real, fake = public_results(False), public_results(True)
    assert len(real) == len(fake) == 11
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype, r.device) == (f.shape, f.stride(), f.dtype, f.device)


def spoiled(name: str, changes: dict[str, Any]) -> tuple[Any, Sample]:
    op, call = sample(name, 3)
    for argument, change in changes.items():
        call.arguments[argument] = change(call.arguments[argument]) if callable(change) else change
    return op, call


@pytest.mark.parametrize(("name", "changes", "message"), BAD, ids=[f"{b[0]}-{b[2][:40]}" for b in BAD])
def test_bad_arguments_are_refused_alike(name: str, changes: dict[str, Any], message: str) -> None:
    """Eager on every backend, through the torch op, and on fake tensors: `op: argument must be ...`, in one wording."""
    op, call = spoiled(name, changes)
    before = call.clone()
    expected = f"{name}: {message}"
    for backend in ("auto", *op.backends):
        with pytest.raises(flashinfer.InvalidArgumentError) as caught:
            op(*call.arguments.values(), backend=backend)
        assert str(caught.value) == expected, backend
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(flashinfer.InvalidArgumentError) as caught:
        op(*call.arguments.values())
    assert str(caught.value) == expected
    for got, old in zip(call.arguments.values(), before.arguments.values(), strict=True):
        for g, o in zip(tensors(got), tensors(old), strict=True):
            assert g.is_meta or torch.equal(g, o)


@pytest.mark.parametrize(("name", "changes", "message"), BAD, ids=[f"{b[0]}-{b[2][:40]}" for b in BAD])
def test_a_self_checking_backend_refuses_what_the_check_refuses(
    name: str, changes: dict[str, Any], message: str
) -> None:
    """Its own check is in C++: whatever that lets through would run unchecked."""
    op, call = spoiled(name, changes)
    runs = [run for _, run in map(op.functions, op.backends) if run in core._self_checking]
    for run in runs:
        with pytest.raises(core._OBJECTIONS) as caught:
            run(*call.arguments.values())
        assert not str(caught.value).startswith(f"{name}:"), "a kernel has run, and found something else to report"


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_tensors_without_memory_are_refused(name: str, variant: int) -> None:
    """All on one device, and that is none; fake tensors, which stand for real ones, pass (above)."""
    op, call = sample(name, 3, variant)

    def meta(a: Any) -> Any:
        if isinstance(a, list):
            return [meta(t) for t in a]
        return a.to("meta") if isinstance(a, torch.Tensor) else a

    arguments = [meta(a) for a in call.arguments.values()]
    for run in (op, lambda *a: op._torch_op(*a, "auto"), lambda *a: flashinfer.explain(name, *a)):
        with pytest.raises(flashinfer.InvalidArgumentError) as caught:
            run(*arguments)
        assert str(caught.value) == f"{name}: tensors must be on a CPU or GPU, got meta"
