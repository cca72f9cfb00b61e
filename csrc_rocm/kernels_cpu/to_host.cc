// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Small vectors into memory of their own, on the CPU.
#include "kernels/to_host.h"

namespace fi {
namespace {

template <typename T>
void copy(const ToHostVector& v, void* block) {
  auto* to = reinterpret_cast<T*>(static_cast<char*>(block) + v.begin);
  for (int64_t i = 0; i < v.size; ++i) to[i] = static_cast<const T*>(v.from)[i * v.stride];
}

}  // namespace

int to_host(const ToHostParams& p, void*) {
  for (int i = 0; i < p.count; ++i) {
    const ToHostVector& v = p.vectors[i];
    v.wide ? copy<int64_t>(v, p.block) : copy<int32_t>(v, p.block);
  }
  return 0;
}

}  // namespace fi
