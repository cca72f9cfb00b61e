// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Whether what an op reads may lie in what it writes.
#pragma once

#include "shims/tensor.h"

namespace fi {

// Bytes from the first to the last element of the dimensions from `dim` on.
inline int64_t extent(const at::Tensor& t, int64_t dim) {
  int64_t elements = 1;
  for (; dim < t.dim(); ++dim) elements += (t.size(dim) - 1) * t.stride(dim);
  return elements * t.element_size();
}

// Whether two tensors of as many dimensions have no memory in common; says no if it cannot tell. The rule of `apart` in
// flashinfer/core/checks.py.
inline bool are_apart(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return true;
  const auto a_at = reinterpret_cast<int64_t>(a.const_data_ptr()), b_at = reinterpret_cast<int64_t>(b.const_data_ptr());
  if (a_at + extent(a, 0) <= b_at || b_at + extent(b, 0) <= a_at) return true;
  const auto modulo = [](int64_t value, int64_t period) { return (value % period + period) % period; };
  for (int64_t dim = 0; dim < a.dim() - 1; ++dim) {
    // Both repeat at one distance, and so do all dimensions around this one.
    const int64_t period = byte_stride(a.size(dim) > 1 ? a : b, dim);
    bool repeats = period > 0 && (a.size(dim) > 1 || b.size(dim) > 1);
    repeats = repeats && (b.size(dim) <= 1 || byte_stride(b, dim) == period);
    for (int64_t d = 0; repeats && d < dim; ++d) {
      for (const at::Tensor* t : {&a, &b}) repeats = repeats && (t->size(d) <= 1 || byte_stride(*t, d) % period == 0);
    }
    if (!repeats) continue;
    const int64_t a_size = extent(a, dim + 1), b_size = extent(b, dim + 1);
    if (a_size > period || b_size > period) continue;
    if (modulo(b_at - a_at, period) >= a_size && modulo(a_at - b_at, period) >= b_size) return true;
  }
  return false;
}

}  // namespace fi
