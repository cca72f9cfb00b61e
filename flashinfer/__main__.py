# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer`."""

from __future__ import annotations

import sys

from flashinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
