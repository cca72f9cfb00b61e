# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Plug-ins for serving engines. Each folder may import its engine; nothing else in the package does."""
