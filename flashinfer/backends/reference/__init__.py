# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Plain torch: the oracle of the tests and the last resort of `auto`."""
