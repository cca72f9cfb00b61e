# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What every layer shares: errors, checks, dtypes, the op class."""
