# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton, for whatever GPU Triton compiles for, and for its interpreter on the CPU."""
