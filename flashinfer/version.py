# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The one place that holds the version: the build reads it as text, so it stays a literal."""

__version__ = "0.1.0"
