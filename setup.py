# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: the C++ sources travel inside the package, and compiled modules may.

An installed package builds its modules from `flashinfer/data/csrc_rocm`, and finds those that were built
ahead of time in `flashinfer/data/aot`. To ship such modules, build them with `python -m flashinfer build --out
DIR` and make the wheel with `FLASHINFER_WHEEL_AOT_DIR=DIR`; it then is one for this platform only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
AOT = os.environ.get("FLASHINFER_WHEEL_AOT_DIR")


class BuildWithSources(build_py):
    """Copies the data directories into a built package; an editable install finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        data = Path(self.build_lib) / "flashinfer" / "data"
        for source, name in ((ROOT / "csrc_rocm", "csrc_rocm"), (AOT, "aot")):
            if source is not None:
                shutil.rmtree(data / name, ignore_errors=True)
                shutil.copytree(source, data / name)


class MaybeBinary(Distribution):
    """A distribution that is bound to a platform as soon as compiled modules are in it."""

    def has_ext_modules(self) -> bool:
        return AOT is not None


setup(cmdclass={"build_py": BuildWithSources}, distclass=MaybeBinary)
