# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles a module in a temporary directory and publishes it by one rename.

The rename is what makes this correct: a directory under its final name is complete, whoever was killed and
however many built at once. The lock only keeps processes from doing the same work. It is a `flock`, which the
kernel drops together with its holder; that the file stays behind means nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shlex
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flashinfer.core import env
from flashinfer.core.errors import BackendUnavailableError, BuildError, MissingJITCacheError
from flashinfer.jit import cache, ninja
from flashinfer.jit.spec import CONFIG_HEADER, Foreign, JitSpec
from flashinfer.jit.toolchain import Toolchain

_TAIL_LINES = 40
_EXPORTS = "exports.map"
_SILENT: dict[str, tuple[str, ...]] = {
    "cpu": ("-w",),
    # An error by default, and AITER 0.1.7 has it: clang became stricter than the C++ it was written in.
    "hip": ("-w", "-Wno-missing-template-arg-list-after-template-kw"),
    "cuda": ("-w",),
}
# What makes the kernel compiler take device code whatever the file's name; hipcc is always told.
_LANGUAGE: dict[str, tuple[str, ...]] = {"cpu": ("-x", "c++"), "hip": (), "cuda": ("-x", "cu")}


def obtain(spec: JitSpec, toolchain: Toolchain, *, csrc: Path | None = None) -> tuple[Toolchain, Path]:
    """An existing module for the toolchain's device, else a freshly built one.

    Returns
    -------
    tuple
        The toolchain the module was made for, which may lack the feature flags of the one given, and the path
        of the shared object.

    Raises
    ------
    MissingJITCacheError
        If there is none and `FLASHINFER_DISABLE_JIT` is set.
    BuildError
        If it does not compile.
    BackendUnavailableError
        If a compiler, ninja or a writable cache is missing.
    """
    return cache.find(spec, toolchain, csrc) or (toolchain, build(spec, toolchain, csrc=csrc))


def build(spec: JitSpec, toolchain: Toolchain, *, csrc: Path | None = None, root: Path | None = None) -> Path:
    """Compile a module unless it is there already.

    Parameters
    ----------
    spec
        What to compile.
    toolchain
        What to compile for.
    csrc
        Source root; the package's own by default.
    root
        Where the module goes; the cache by default.

    Returns
    -------
    Path
        The shared object, in the module's directory `<root>/<target>/<name>-<digest>`.

    Raises
    ------
    As `obtain`.
    """
    # Ninja runs elsewhere: no path may depend on the working directory.
    csrc = (csrc or cache.csrc_root()).absolute()
    asked_for = root
    root = (root or cache.cache_root()).absolute()
    writing = functools.partial(_writing, root, is_cache=asked_for is None)
    if env.disable_jit():
        raise MissingJITCacheError(
            spec,
            f"looked for {toolchain.label}/{spec.name}-* of this version in {cache.aot_root()} and {root}",
            toolchain.arch.split(":")[0] or toolchain.target,
        )
    key = cache.module_key(spec, toolchain, csrc)
    identity = toolchain.compiler_identity()
    final = key.directory(root, identity)
    library = cache.whole_module(final)
    if library is not None:
        return library
    with writing():
        final.parent.mkdir(parents=True, exist_ok=True)
    with _Progress(spec.name, toolchain.label) as progress, _lock(final, writing, progress):
        library = cache.whole_module(final)
        if library is not None:
            return library
        scratch = final.parent / f".tmp-{final.name}-{uuid.uuid4().hex[:8]}"
        try:
            with writing():
                # Not tempfile: a cache that several users share needs the mode that the umask gives.
                scratch.mkdir()
            _compile(spec, toolchain, csrc, scratch, final, progress)
            if cache.module_key(spec, toolchain, csrc) != key:
                # Edited meanwhile: what was compiled is neither surely the old nor the new.
                return build(spec, toolchain, csrc=csrc, root=asked_for)
            with writing():
                cache.write_manifest(scratch, key, identity)
                _publish(scratch, final)
        finally:
            cache.remove(scratch)
    return final / f"{spec.name}.so"


def steps(spec: JitSpec, toolchain: Toolchain, csrc: Path, soname: str = "") -> list[ninja.Step]:
    """The commands that make a module, to be run in the directory that holds the generated files."""
    found = []
    includes = ("-I.", f"-I{csrc}")
    kernel = (*toolchain.kernel_compiler().command, *toolchain.kernel_flags, *includes)
    host = toolchain.host_compiler().command
    namespace = f"-DFI_NAMESPACE={namespace_of(spec, toolchain)}"
    shim = (*host, *toolchain.shim_flags, namespace, *includes, *toolchain.shim_includes())
    sources = [(kernel, s) for s in spec.kernels_for(toolchain.target)] + [(shim, s) for s in spec.shims]
    for command, source in sources:
        path, output = str(csrc / source), f"{source.replace('/', '.')}.o"
        found.append(ninja.Step(output, (path,), (*command, "-c", path, "-o", output)))
    more: tuple[str, ...] = ()
    if spec.foreign is not None:
        found += _foreign_steps(spec.foreign, toolchain, csrc)
        more = _foreign_link_flags(spec.foreign, soname)
    objects = tuple(step.output for step in found)
    output = f"{spec.name}.so"
    link = (*host, *objects, "-o", output, *toolchain.link_paths(), *toolchain.link_flags, *more)
    return [*found, ninja.Step(output, objects, link)]


def _foreign_steps(foreign: Foreign, toolchain: Toolchain, csrc: Path) -> Iterator[ninja.Step]:
    """Another project's sources, whose warnings are not ours to mend, and the glue to them."""
    includes = tuple(word for folder in foreign.includes for word in ("-isystem", str(folder)))
    # torch/extension.h, which such sources may include, draws in Python's headers.
    torch_includes = (
        (*toolchain.shim_includes(), "-isystem", sysconfig.get_path("include")) if foreign.uses_torch else ()
    )
    flags = (*toolchain.kernel_flags, *foreign.flags, *_LANGUAGE[toolchain.target])
    command = (*toolchain.kernel_compiler().command, *flags)
    for source in foreign.glue:
        path, output = str(csrc / source), f"{source.replace('/', '.')}.o"
        line = (*command, "-I.", f"-I{csrc}", *includes, *torch_includes, "-c", path, "-o", output)
        yield ninja.Step(output, (path,), line)
    for source in foreign.sources:
        path, output = str(foreign.root / source), f"foreign.{source.replace('/', '.')}.o"
        yield ninja.Step(
            output,
            (path,),
            (*command, *_SILENT[toolchain.target], *includes, *torch_includes, "-c", path, "-o", output),
        )


def _foreign_link_flags(foreign: Foreign, soname: str) -> tuple[str, ...]:
    torch_lib = Path(torch.__file__).parent / "lib"
    libraries = (f"-l{name}" for name in foreign.libraries if (torch_lib / f"lib{name}.so").exists())
    # The loader takes an equal name for the same library, wherever the file lies.
    return (f"-Wl,-soname,{soname}", "-Wl,-Bsymbolic", f"-Wl,--version-script={_EXPORTS}", *libraries)


def namespace_of(spec: JitSpec, toolchain: Toolchain) -> str:
    """Namespace of the module's torch ops; one per target and arch, so that unlike GPUs share a process.

    Modules with sources of another project also name which: a process may meet several versions of it.
    """
    name = spec.name if spec.foreign is None else f"{spec.name}_{spec.foreign.digest[:8]}"
    return f"flashinfer_{name}_{toolchain.label}"


def _compile(spec: JitSpec, toolchain: Toolchain, csrc: Path, scratch: Path, final: Path, progress: _Progress) -> None:
    failure_log = final.with_name(f"{final.name}.log")
    (scratch / CONFIG_HEADER).write_text(spec.config_header())
    if spec.foreign is not None:
        (scratch / _EXPORTS).write_text(
            f"{{ global: {' '.join(f'{name};' for name in spec.foreign.exports)} local: *; }};\n"
        )
    commands = steps(spec, toolchain, csrc, f"lib{final.name}.so")
    (scratch / "build.ninja").write_text(ninja.render(commands))
    log = scratch / "build.log"
    progress.show("compiling")
    failure = ninja.run(scratch, log, progress.step)
    if failure is not None:
        # Under a name of its own, since the scratch directory goes.
        os.replace(log, failure_log)
        tail = "\n".join(failure.output.splitlines()[-_TAIL_LINES:])
        raise BuildError(spec.name, failure.command, f"{tail}\nwhole log: {failure_log}")
    for step in commands:
        # Ninja goes by the exit status alone.
        if not (scratch / step.output).is_file():
            name = step.output
            raise BuildError(spec.name, shlex.join(step.command), f"it ended well and produced no {name}: no compiler?")
    for path in scratch.iterdir():
        if path.name != f"{spec.name}.so":
            cache.remove(path)


def _publish(scratch: Path, final: Path) -> None:
    """Give a complete directory its name. Where a whole module has it already, that one stays."""
    for path in scratch.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    while True:
        try:
            os.rename(scratch, final)
            return
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if cache.whole_module(final) is not None:
            return
        # Damaged after it was published. Moved away rather than deleted, so that no one sees it half gone.
        damaged = final.parent / f".tmp-damaged-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(final, damaged)
            cache.remove(damaged)


@contextlib.contextmanager
def _writing(root: Path, *, is_cache: bool) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if not is_cache:
            raise BackendUnavailableError(f"jit: the folder for modules must be writable, got {e}; name another") from e
        raise BackendUnavailableError(
            f"jit: the module cache must be writable, got {e} for {root}; "
            "set FLASHINFER_CACHE_DIR to a folder that is, or build ahead of time and set FLASHINFER_AOT_DIR"
        ) from e


@contextlib.contextmanager
def _lock(
    final: Path, writing: Callable[[], contextlib.AbstractContextManager[None]], progress: _Progress
) -> Iterator[None]:
    with writing():
        file = final.with_name(f"{final.name}.lock").open("w")
    with file:
        # A file system that cannot lock costs a second compilation, nothing else.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.show("waiting for another process that builds it")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Progress:
    """One line on a terminal's stderr that says what is being waited for; silent elsewhere."""

    def __init__(self, name: str, label: str) -> None:
        self._head = f"flashinfer: module {name} for {label}:"
        self._shown = False
        self._start = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self.show(f"{time.monotonic() - self._start:.1f} s\n")

    def step(self, done: int, total: int) -> None:
        self.show(f"compiled {done} of {total} files")

    def show(self, text: str) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            self._shown = True
            # Carriage return and "erase to the end": each text takes the place of the last.
            sys.stderr.write(f"\r\x1b[K{self._head} {text}")
            sys.stderr.flush()
