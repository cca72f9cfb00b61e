# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""AMD's AITER kernels.

`import aiter` happens inside of a call if at all: whether AITER is there, and which, says
`flashinfer.core.aiter_install` without importing it.
"""
