# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Many processes, killed processes, and locks that nobody holds. All of it is known fault 40."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from flashinfer.jit import cache
from flashinfer.jit.build import build
from flashinfer.jit.spec import JitSpec
from flashinfer.jit.toolchain import Toolchain
from rocm_tests.jit.toy import SPEC, script

CPU = Toolchain("cpu")
FORK = multiprocessing.get_context("fork")
LIMIT_S = 60


def build_and_call(spec: JitSpec, csrc: Path, start: Barrier, results: SimpleQueue[tuple[str, int]]) -> None:
    start.wait(LIMIT_S)
    library = build(spec, CPU, csrc=csrc)
    results.put((str(library), ctypes.CDLL(str(library)).toy_answer()))


def build_at_once(specs: Sequence[JitSpec], csrc: Path) -> list[tuple[str, int]]:
    """Build each spec in a process of its own; return the paths and what the modules answer."""
    start, results = FORK.Barrier(len(specs)), FORK.SimpleQueue()
    processes = [FORK.Process(target=build_and_call, args=(s, csrc, start, results)) for s in specs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    assert [p.exitcode for p in processes] == [0] * len(specs)
    return [results.get() for _ in specs]


# known fault 40
def test_eight_processes_build_one_module_once(csrc: Path, ninja_runs: Path) -> None:
    results = build_at_once([SPEC] * 8, csrc)
    assert len(set(results)) == 1
    assert results[0][1] == 42
    assert ninja_runs.read_text().count("run") == 1
    assert [entry.whole for entry in cache.entries(cache.cache_root())] == [True]


# known fault 40
def test_eight_processes_build_eight_modules(csrc: Path) -> None:
    specs = [dataclasses.replace(SPEC, name=f"toy{i}", defines=(("TOY_BASE", str(i)),)) for i in range(8)]
    results = build_at_once(specs, csrc)
    assert sorted(answer for _, answer in results) == [i + 2 for i in range(8)]
    assert len({path for path, _ in results}) == 8
    assert all(entry.whole for entry in cache.entries(cache.cache_root()))


# known fault 40
def test_the_lock_is_not_what_makes_it_correct(csrc: Path, ninja_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "this file system has no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    results = build_at_once([SPEC] * 4, csrc)
    assert len(set(results)) == 1
    assert ninja_runs.read_text().count("run") > 1, "without a lock several should have built"
    assert [entry.whole for entry in cache.entries(cache.cache_root())] == [True]
    assert not list(cache.cache_root().glob("cpu/.tmp*"))


def build_in_own_group(csrc: Path) -> None:
    os.setsid()
    build(SPEC, CPU, csrc=csrc)


# known fault 40
def test_killed_builder_leaves_nothing_and_blocks_nobody(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, held = tmp_path / "hold", tmp_path / "held"
    hold.touch()
    # The pause comes after an object is written: there is something to mistake for a module.
    pause = f'if [ -e "{hold}" ]; then touch "{held}"; sleep {LIMIT_S}; fi'
    body = f'g++ "$@" || exit\n[ "$1" = --version ] && exit\n{pause}'
    monkeypatch.setenv("CXX", str(script(tmp_path / "slow", body)))
    builder = FORK.Process(target=build_in_own_group, args=(csrc,))
    builder.start()
    deadline = time.monotonic() + LIMIT_S
    while not held.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held.exists(), "the build never came to the compiler"
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join(LIMIT_S)
    assert list(cache.cache_root().glob("cpu/.tmp*")), "the test killed nothing that was at work"
    assert list(cache.cache_root().glob("cpu/*.lock"))
    assert not list(cache.entries(cache.cache_root()))
    assert cache.find(SPEC, CPU, csrc) is None

    hold.unlink()
    ((_, answer),) = build_at_once([SPEC], csrc)
    assert answer == 42
    with contextlib.suppress(ProcessLookupError):
        os.killpg(builder.pid, signal.SIGKILL)


# known fault 40
def test_stale_lock_file_means_nothing(csrc: Path) -> None:
    library = build(SPEC, CPU, csrc=csrc)
    lock = library.parent.with_name(f"{library.parent.name}.lock")
    assert lock.exists()
    lock.write_text(f"{os.getpid()} {os.uname().nodename}")
    library.unlink()
    ((_, answer),) = build_at_once([SPEC], csrc)
    assert answer == 42
