# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks share: comparisons, tolerances, hostile inputs and timers."""
