// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Memory of plans: blocks of host memory, words in it for one copy, and views that are made without the dispatcher.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstring>
#include <vector>

#include "shims/tensor.h"

namespace fi {

inline bool is_host_index_vector(const at::Tensor& t) { return is_index_vector(t, c10::Device(c10::kCPU)); }

// Host memory, pinned if a GPU will reach it. Pinned memory comes from torch's allocator, which hands a block out again
// when the copies that read it are over: it records an event as the block is given back.
inline at::Tensor host_block(const at::Tensor& like, int64_t bytes, bool pinned) {
  return like.new_empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(pinned));
}

// Words in such memory, for one copy.
inline at::Tensor host_words(const at::Tensor& like, const std::vector<int32_t>& words, bool pinned,
                             int64_t spare = 0) {
  const auto options = at::TensorOptions().dtype(at::kInt).device(at::kCPU).pinned_memory(pinned);
  at::Tensor found = like.new_empty({static_cast<int64_t>(words.size()) + spare}, options);
  std::memcpy(found.mutable_data_ptr<int32_t>(), words.data(), words.size() * sizeof(int32_t));
  return found;
}

// Copies an index vector as int32. Returns where the first number is that does not fit, or -1.
inline int64_t narrow(const at::Tensor& from, int32_t* to) {
  if (from.scalar_type() == at::kInt) {
    std::memcpy(to, from.const_data_ptr(), static_cast<size_t>(from.numel()) * sizeof(int32_t));
    return -1;
  }
  const auto* numbers = from.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < from.numel(); ++i) {
    to[i] = static_cast<int32_t>(numbers[i]);
    if (to[i] != numbers[i]) return i;
  }
  return -1;
}

// Elements of another vector's memory. Nothing here has a gradient, and through the dispatcher a view takes longer than
// a chunk of a plan takes to be cut.
inline at::Tensor view_of(const at::Tensor& base, const caffe2::TypeMeta& dtype, int64_t offset, int64_t size) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                             base.key_set(), dtype);
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  const int64_t stride = 1;
  impl->set_sizes_and_strides(at::IntArrayRef(size), at::IntArrayRef(stride));
  return view;
}

// Successive parts of a vector of words.
class Parts {
 public:
  explicit Parts(const at::Tensor& base) : base_(base), at_(base.storage_offset()) {}

  // A part, with `gap` words behind it that belong to none.
  at::Tensor next(int64_t size, int64_t gap = 0) {
    at::Tensor part = view_of(base_, base_.dtype(), at_, size);
    at_ += size + gap;
    return part;
  }

 private:
  const at::Tensor& base_;
  int64_t at_;
};

}  // namespace fi
