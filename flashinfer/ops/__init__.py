# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Op declarations: schema, check, fake and the order of backends. No kernels."""
