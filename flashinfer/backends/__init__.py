# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Backends by name; each family is a module with `why_not_<op>` and `<op>`."""
