// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Memory of plans: words in host memory for one copy, and views that are made without the dispatcher.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstring>
#include <vector>

#include "shims/tensor.h"

namespace fi {

inline bool is_host_index_vector(const at::Tensor& t) { return is_index_vector(t, c10::Device(c10::kCPU)); }

// Words in host memory, pinned if a GPU will read them. Pinned memory comes from torch's allocator, which hands a block
// out again when the copies that read it are over: it records an event as the block is given back.
inline at::Tensor host_words(const at::Tensor& like, const std::vector<int32_t>& words, bool pinned,
                             int64_t spare = 0) {
  const auto options = at::TensorOptions().dtype(at::kInt).device(at::kCPU).pinned_memory(pinned);
  at::Tensor found = like.new_empty({static_cast<int64_t>(words.size()) + spare}, options);
  std::memcpy(found.mutable_data_ptr<int32_t>(), words.data(), words.size() * sizeof(int32_t));
  return found;
}

// Successive parts of a vector of words. A plan has dozens, none has a gradient, and each would take the dispatcher
// longer than a chunk takes to be cut.
class Parts {
 public:
  explicit Parts(const at::Tensor& base) : base_(base), at_(base.storage_offset()) {}

  // A part, with `gap` words behind it that belong to none.
  at::Tensor next(int64_t size, int64_t gap = 0) {
    at::Tensor part = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base_.storage()),
                                                               base_.key_set(), base_.dtype());
    c10::TensorImpl* impl = part.unsafeGetTensorImpl();
    impl->set_storage_offset(at_);
    const int64_t stride = 1;
    impl->set_sizes_and_strides(at::IntArrayRef(size), at::IntArrayRef(stride));
    at_ += size + gap;
    return part;
  }

 private:
  const at::Tensor& base_;
  int64_t at_;
};

}  // namespace fi
