// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// What every shim needs of torch: the current stream, the device guard, and tensors as kernel arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "kernels/common/fault.h"

namespace fi {

// Native handle of torch's current stream on the tensor's device; nullptr on the CPU. Goes through c10's
// virtual guard, so that one source serves ROCm, CUDA and CPU builds of torch without c10/hip or c10/cuda
// headers.
inline void* current_stream(const at::Tensor& t) {
  const c10::Device device = t.device();
  if (device.is_cpu()) return nullptr;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

inline IndexArray index_array(const at::Tensor& t) { return IndexArray{t.const_data_ptr(), t.element_size() == 8}; }

// Memory that a kernel is about to write. Autograd is told, as by any operation in place, so that a backward pass that
// saved the tensor refuses instead of using what is there now; tensors made in inference mode have no such count.
inline void* memory_to_write(const at::Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  return t.mutable_data_ptr();
}

inline int64_t byte_stride(const at::Tensor& t, int64_t dim) { return t.stride(dim) * t.element_size(); }

inline Fault* fault_of(const at::Tensor& t) { return reinterpret_cast<Fault*>(t.mutable_data_ptr<int64_t>()); }

// For self-checking ops: refuses in few words; the op's Python check then runs and says what is wrong. Every
// condition of that check must be covered, which tests/rocm_tests/contract holds against it.
inline void require(bool condition) { TORCH_CHECK_VALUE(condition, "refused"); }

// Kernels count in 32 bits within a page and a row. A size that does not fit must not be cut off in silence.
inline int32_t to_int32(int64_t size) {
  require(size >= 0 && size <= INT32_MAX);
  return static_cast<int32_t>(size);
}

inline bool is_index_vector(const at::Tensor& t, const c10::Device& device) {
  const auto type = t.scalar_type();
  return t.dim() == 1 && (type == at::kInt || type == at::kLong) && t.device() == device && t.is_contiguous();
}

inline bool is_dense_last(const at::Tensor& t) { return t.size(-1) <= 1 || t.stride(-1) == 1; }

inline bool is_alike(const at::Tensor& t, const at::Tensor& model) {
  return t.scalar_type() == model.scalar_type() && t.device() == model.device();
}

// Distinct elements at distinct places, as far as strides alone can tell.
inline bool is_writable(const at::Tensor& t) {
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    if (t.size(dim) > 1 && t.stride(dim) == 0) return false;
  }
  return true;
}

inline bool is_movable(const at::Tensor& t) {
  const auto bytes = t.element_size();
  return bytes == 1 || bytes == 2 || bytes == 4;
}

// The op turns this sentence into a LaunchError.
inline void check_launch(int code, const char* op) { TORCH_CHECK(code == 0, op, ": launch failed with code ", code); }

}  // namespace fi
