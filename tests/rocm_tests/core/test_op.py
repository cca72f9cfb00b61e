# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The op core with a toy op: check, selection and its overrides, and the way through the dispatcher."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer.core import env
from flashinfer.core import op as core
from flashinfer.core.checks import fail
from flashinfer.core.errors import BackendUnavailableError
from flashinfer.core.op import OPS, Op
from rocm_tests.core.environment import set_variable

numbers = itertools.count()


class Toy:
    """An op that adds a backend's number to `x`, on three backends; the first takes only tensors of two elements."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        self.calls: list[str] = []
        self.modules = {
            "picky": self.module(1, lambda x, scale: None if x.numel() == 2 else f"needs 2 elements, got {x.numel()}"),
            "plain": self.module(2, lambda x, scale: None),
            "broken": self.module(3, lambda x, scale: "needs a machine of another kind"),
        }
        for backend, module in self.modules.items():
            monkeypatch.setitem(sys.modules, f"flashinfer.backends.{backend}", ModuleType(backend))
            monkeypatch.setitem(sys.modules, f"flashinfer.backends.{backend}.toy", module)
        self.op = Op(
            name, "toy", "Tensor(a!) x, float scale -> ()", check=self.check, backends=("picky", "plain", "broken")
        )

    def module(self, number: int, why_not: object) -> ModuleType:
        module = ModuleType(f"toy{number}")

        def run(x: torch.Tensor, scale: float) -> None:
            self.calls.append(f"run {number}")
            x.add_(number * scale)

        setattr(module, f"why_not_{self.name}", why_not)
        setattr(module, self.name, run)
        return module

    def check(self, x: torch.Tensor, scale: float) -> None:
        self.calls.append("check")
        if x.dim() != 1:
            fail(self.name, "x", "1-D", x.dim())


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    set_variable(monkeypatch, env.backend, "")
    made = Toy(f"toy_{next(numbers)}", monkeypatch)
    yield made
    # Others that a test has brought in stay: their modules are not run again.
    del OPS[made.name]


def added(toy: Toy, size: int = 3, **options: str) -> float:
    x = torch.zeros(size)
    toy.op(x, 1.0, **options)
    return float(x[0])


def test_auto_takes_the_first_that_does_not_decline(toy: Toy) -> None:
    assert added(toy, size=2) == 1
    assert added(toy, size=3) == 2
    assert toy.calls == ["check", "run 1", "check", "run 2"]


def test_the_choice_of_auto_is_told_once(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    """One line for each backend and reason; nothing of a backend that was asked for, or where nobody listens."""
    with caplog.at_level(logging.INFO, "flashinfer"):
        toy.op(torch.zeros(3), 1.0)
    with caplog.at_level(logging.DEBUG, "flashinfer"):
        for size in (3, 2, 3, 2, 5):
            toy.op(torch.zeros(size), 1.0)
        toy.op(torch.zeros(2), 1.0, backend="picky")
        toy.op(torch.zeros(7), 1.0, backend="plain")
        with core.use_backend("plain"):
            toy.op(torch.zeros(8), 1.0)
        flashinfer.explain(toy.name, torch.zeros(9), 1.0)
    assert [record.message for record in caplog.records] == [
        f"{toy.name}: auto takes plain; not picky: needs 2 elements, got 3",
        f"{toy.name}: auto takes picky",
        f"{toy.name}: auto takes plain; not picky: needs 2 elements, got 5",
    ]


def test_what_cannot_be_made_ready_is_told(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    def ready(*args: object) -> None:
        setattr(toy.modules["picky"], f"why_not_{toy.name}", lambda *args: "did not compile")
        toy.op._loaded.clear()
        raise BackendUnavailableError("toy")

    setattr(toy.modules["picky"], f"ready_{toy.name}", ready)
    with caplog.at_level(logging.DEBUG, "flashinfer"):
        toy.op(torch.zeros(2), 1.0)
        toy.op(torch.zeros(2), 1.0)
    assert [r.message for r in caplog.records] == [f"{toy.name}: auto takes plain; not picky: did not compile"]


def test_a_backend_asked_for_by_name_never_falls_back(toy: Toy) -> None:
    assert added(toy, size=2, backend="plain") == 2
    x = torch.zeros(3)
    for backend, reason in (("picky", "needs 2 elements, got 3"), ("broken", "needs a machine of another kind")):
        with pytest.raises(flashinfer.BackendUnavailableError) as caught:
            toy.op(x, 0.5, backend=backend)
        lines = str(caught.value).splitlines()
        assert lines[0] == f"{toy.name}: no backend takes this call"
        assert lines[1:] == [f"  {backend}: {reason}", "  inputs: float32[3] on cpu, 0.5"]
    assert float(x.sum()) == 0


def test_if_none_takes_the_call_all_say_why(toy: Toy) -> None:
    toy.op.backends = ("picky", "broken")
    with pytest.raises(flashinfer.BackendUnavailableError) as caught:
        added(toy)
    assert "  picky: needs 2 elements, got 3\n  broken: needs a machine of another kind\n" in str(caught.value)


@pytest.mark.parametrize("name", ["cuda", "Plain", "", "plain "])
def test_a_name_that_is_none_is_refused_with_the_list(name: str, toy: Toy) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        added(toy, backend=name)
    assert str(caught.value) == (
        f"{toy.name}: backend must be one of ('auto', 'picky', 'plain', 'broken'), got {name!r}"
    )


def test_call_beats_context_beats_environment(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variable(monkeypatch, env.backend, " plain ")
    assert added(toy, size=2) == 2
    with flashinfer.use_backend("picky"):
        assert added(toy, size=2) == 1
        assert added(toy, size=2, backend="plain") == 2
        with flashinfer.use_backend("plain"):
            assert added(toy, size=2) == 2
        assert added(toy, size=2) == 1
        with flashinfer.use_backend("auto"):
            assert added(toy, size=3) == 2
    assert added(toy, size=2) == 2
    set_variable(monkeypatch, env.backend, "auto")
    assert added(toy, size=2) == 1
    set_variable(monkeypatch, env.backend, "broken")
    with pytest.raises(flashinfer.BackendUnavailableError, match="needs a machine of another kind"):
        added(toy)
    set_variable(monkeypatch, env.backend, "nonsense")
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        added(toy)
    names = ("auto", *core.known_backends())
    assert str(caught.value) == f"{toy.name}: FLASHINFER_BACKEND must be one of {names}, got 'nonsense'"
    with pytest.raises(flashinfer.InvalidArgumentError) as caught, flashinfer.use_backend("nowhere"):
        added(toy)
    assert str(caught.value) == f"{toy.name}: backend of use_backend must be one of {names}, got 'nowhere'"


def test_a_backend_of_other_ops_is_not_the_callers_mistake(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named for a whole program, it cannot be there for every op; the call still does not go elsewhere."""
    sentence = (
        f"{toy.name}: no backend takes this call\n  native: this op has no such backend ({{}}); it has picky, plain"
    )
    with pytest.raises(flashinfer.BackendUnavailableError) as caught:
        added(toy, backend="native")
    assert str(caught.value).startswith(sentence.format("backend"))
    with pytest.raises(flashinfer.BackendUnavailableError) as caught, flashinfer.use_backend("native"):
        added(toy)
    assert str(caught.value).startswith(sentence.format("backend of use_backend"))
    set_variable(monkeypatch, env.backend, "native")
    with pytest.raises(flashinfer.BackendUnavailableError) as caught:
        added(toy)
    assert str(caught.value).startswith(sentence.format("FLASHINFER_BACKEND"))
    assert "run 2" not in toy.calls


def test_a_step_keeps_to_its_own_backends(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that another step of the same call has means nothing to this one."""
    assert added(toy, size=2, backend=f"{core.STEP}plain") == 2
    assert added(toy, size=2, backend=f"{core.STEP}native") == 1
    for name, number in (("native", 1), ("plain", 2)):
        with flashinfer.use_backend(name):
            assert added(toy, size=2, backend=f"{core.STEP}auto") == number
        set_variable(monkeypatch, env.backend, name)
        assert added(toy, size=2, backend=f"{core.STEP}auto") == number
    with pytest.raises(flashinfer.BackendUnavailableError, match="broken: needs a machine of another kind"):
        added(toy, backend=f"{core.STEP}broken")
    with toy.op.asked_only() as answers:
        added(toy, backend=f"{core.STEP}auto")
    assert answers == {}


def test_what_declines_one_of_several_calls_declines_them_all(toy: Toy) -> None:
    with toy.op.asked_only() as answers:
        for size in (2, 3, 2):
            added(toy, size=size, backend="auto")
    assert answers == {
        "picky": "needs 2 elements, got 3",
        "plain": None,
        "broken": "needs a machine of another kind",
    }


@pytest.mark.parametrize("name", [None, "", 7])
def test_a_context_needs_a_name(name: object) -> None:
    refused = pytest.raises(flashinfer.InvalidArgumentError, match="use_backend: name must be a backend's name")
    with refused, flashinfer.use_backend(name):  # type: ignore[arg-type]
        pass


def test_a_context_ends_with_its_block_and_stays_in_its_thread(toy: Toy) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError), flashinfer.use_backend("plain"):
        toy.op(torch.zeros(2, 2), 1.0)
    assert added(toy, size=2) == 1
    seen: list[float] = []
    with flashinfer.use_backend("plain"):
        thread = threading.Thread(target=lambda: seen.append(added(toy, size=2)))
        thread.start()
        thread.join()
    assert seen == [1]


def test_the_check_speaks_before_any_backend(toy: Toy) -> None:
    for backend in ("auto", "plain"):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"{toy.name}: x must be 1-D, got 2"):
            toy.op(torch.zeros(2, 2), 1.0, backend=backend)
    assert "run 2" not in toy.calls


def test_a_self_checking_backend_is_not_checked_twice(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs after a refusal, to put it in words; a refusal that the check does not share goes on."""
    monkeypatch.setattr(core, "_self_checking", set())

    @core.checks_arguments
    def run(x: torch.Tensor, scale: float) -> None:
        if x.dim() != 1 or scale < 0:
            raise ValueError("refused")
        x.add_(7)

    setattr(toy.modules["plain"], toy.name, run)
    assert added(toy) == 7
    assert toy.calls == []
    with pytest.raises(flashinfer.InvalidArgumentError, match="x must be 1-D, got 2"):
        toy.op(torch.zeros(1, 3), 1.0, backend="plain")
    with pytest.raises(ValueError, match=r"^refused$"):
        toy.op(torch.zeros(3), -1.0, backend="plain")


def test_backends_are_imported_on_use(toy: Toy) -> None:
    del sys.modules["flashinfer.backends.plain.toy"]
    assert added(toy, size=2) == 1
    with pytest.raises(ModuleNotFoundError, match=r"flashinfer\.backends\.plain"):
        added(toy, size=3)


def test_an_eager_call_does_not_pass_through_the_dispatcher(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("the dispatcher was entered")

    monkeypatch.setattr(toy.op, "_torch_op", never)
    assert added(toy) == 2
    with pytest.raises(AssertionError, match="the dispatcher was entered"), FakeTensorMode():
        added(toy)


def test_under_a_dispatch_mode_the_check_runs_and_the_backend_does_not(toy: Toy) -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.zeros(3))
        assert toy.op(x, 1.0) is None
        with pytest.raises(flashinfer.InvalidArgumentError, match="x must be 1-D, got 2"):
            toy.op(mode.from_tensor(torch.zeros(2, 2)), 1.0)
    assert toy.calls == ["check", "check"]


def test_the_torch_op_runs_too(toy: Toy) -> None:
    x = torch.zeros(3)
    getattr(torch.ops.flashinfer, toy.name)(x, 2.0, "auto")
    assert x.tolist() == [4, 4, 4]


def test_one_op_is_one_node(toy: Toy) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    def twice(x: torch.Tensor) -> torch.Tensor:
        toy.op(x, 1.0)
        toy.op(x, 1.0, backend="plain")
        return x * 2

    x = torch.zeros(3)
    assert torch.compile(twice, fullgraph=True, backend=keep)(x).tolist() == [8, 8, 8]
    targets = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert targets[:2] == [f"flashinfer.{toy.name}.default"] * 2
    assert len(targets) == 3
    assert len(graphs) == 1


def test_explain_asks_and_does_not_run(toy: Toy) -> None:
    x = torch.zeros(3)
    assert flashinfer.explain(toy.name, x, 1.0) == {
        "picky": "needs 2 elements, got 3",
        "plain": None,
        "broken": "needs a machine of another kind",
    }
    assert flashinfer.explain(toy.name, x, 1.0, backend="plain") == {"plain": None}
    with flashinfer.use_backend("broken"):
        assert flashinfer.explain(toy.name, x, 1.0) == {"broken": "needs a machine of another kind"}
    assert x.tolist() == [0, 0, 0]
    with pytest.raises(flashinfer.InvalidArgumentError, match="x must be 1-D"):
        flashinfer.explain(toy.name, torch.zeros(2, 2), 1.0)


@pytest.mark.parametrize("self_checking", [False, True])
def test_a_refused_launch_is_a_launch_error(toy: Toy, self_checking: bool) -> None:
    def run(x: torch.Tensor, scale: float) -> None:
        raise RuntimeError(f"{toy.name}: launch failed with code 9\nException raised from somewhere")

    setattr(toy.modules["plain"], toy.name, core.checks_arguments(run) if self_checking else run)
    with pytest.raises(flashinfer.LaunchError, match=f"^{toy.name}: launch failed with code 9$"):
        toy.op(torch.zeros(3), 1.0, backend="plain")
