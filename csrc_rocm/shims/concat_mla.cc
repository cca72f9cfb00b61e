// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/concat_mla.h; checks its arguments as flashinfer/ops/concat_mla.py does in words.
#include "kernels/concat_mla.h"

#include "shims/apart.h"
#include "shims/tensor.h"

namespace fi {
namespace {

// FlashInfer's granularity: 16 bytes of 16-bit elements.
constexpr int64_t kMultiple = 8;

// Whether the part is where it is to be written: the thread that reads an element is the one that writes it.
bool is_in_place(const at::Tensor& nope, const at::Tensor& k) {
  for (int64_t dim = 0; dim < 2; ++dim) {
    if (k.size(dim) > 1 && nope.stride(dim) != k.stride(dim)) return false;
  }
  return nope.const_data_ptr() == k.const_data_ptr();
}

bool is_taken(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf || c10::isFloat8Type(type); }

void concat_mla_k_shim(const at::Tensor& k, const at::Tensor& k_nope, const at::Tensor& k_rope) {
  require(k.dim() == 3 && k_nope.dim() == 3 && k_rope.dim() == 3 && is_taken(k.scalar_type()));
  const int64_t tokens = k.size(0), heads = k.size(1), nope = k_nope.size(2), rope = k_rope.size(2);
  require(heads > 0 && nope > 0 && rope > 0 && nope % kMultiple == 0 && rope % kMultiple == 0);
  require(k.size(2) == nope + rope && k_nope.size(0) == tokens && k_nope.size(1) == heads);
  require(k_rope.size(0) == tokens && k_rope.size(1) == 1 && is_writable(k));
  require(!k.requires_grad() || !at::GradMode::is_enabled());
  for (const at::Tensor* t : {&k_nope, &k_rope}) require(is_alike(*t, k) && is_dense_last(*t));
  require(is_dense_last(k) && are_apart(k_rope, k) && (is_in_place(k_nope, k) || are_apart(k_nope, k)));
  const c10::DeviceGuard guard(k.device());
  ConcatMlaParams p{};
  p.k = memory_to_write(k);
  p.nope = k_nope.const_data_ptr();
  p.rope = k_rope.const_data_ptr();
  p.k_token = byte_stride(k, 0);
  p.k_head = byte_stride(k, 1);
  p.nope_token = byte_stride(k_nope, 0);
  p.nope_head = byte_stride(k_nope, 1);
  p.rope_token = byte_stride(k_rope, 0);
  p.tokens = tokens;
  p.heads = to_int32(heads);
  p.nope_bytes = to_int32(nope * k.element_size());
  p.rope_bytes = to_int32(rope * k.element_size());
  check_launch(concat_mla_k(p, current_stream(k)), "concat_mla_k");
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def("concat_mla_k(Tensor(a!) k, Tensor k_nope, Tensor k_rope) -> ()");
  m.impl("concat_mla_k", c10::DispatchKey::CompositeExplicitAutograd, &fi::concat_mla_k_shim);
}
