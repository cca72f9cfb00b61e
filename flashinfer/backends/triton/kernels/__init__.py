# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Device code. These modules import triton, and are imported when a kernel is first launched."""
