// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Whether two MLA caches are the halves of one buffer, and that buffer as a view: AITER's kernels read rows of ckv and
// kpe together, and copying a pool for each call costs as much as the pool is large. Looks at metadata only.
#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <optional>

#include "shims/tensor.h"

namespace fi {
namespace {

// [pages, page_size, dim], rows dense: each row of kpe begins where the same row of ckv ends, and no row reaches into
// the next.
bool are_adjacent(const at::Tensor& ckv, const at::Tensor& kpe) {
  if (ckv.dim() != 3 || kpe.dim() != 3 || !is_alike(kpe, ckv) || ckv.numel() == 0 || kpe.numel() == 0) return false;
  if (kpe.size(0) != ckv.size(0) || kpe.size(1) != ckv.size(1) || !is_dense_last(ckv) || !is_dense_last(kpe)) {
    return false;
  }
  if (!ckv.has_storage() || !kpe.has_storage() || !ckv.storage().is_alias_of(kpe.storage())) return false;
  if (kpe.storage_offset() != ckv.storage_offset() + ckv.size(2)) return false;
  const int64_t width = ckv.size(2) + kpe.size(2);
  // The kernels address a row as page * page_size + offset, so rows of all pages have one distance: their own width.
  int64_t expected = width;
  for (const int64_t dim : {1, 0}) {
    if (ckv.size(dim) > 1 && (ckv.stride(dim) != expected || kpe.stride(dim) != expected)) return false;
    expected *= ckv.size(dim);
  }
  return true;
}

std::optional<at::Tensor> mla_kv_view_shim(const at::Tensor& ckv, const at::Tensor& kpe) {
  if (!are_adjacent(ckv, kpe)) return std::nullopt;
  const int64_t width = ckv.size(2) + kpe.size(2);
  // A cache has no gradient: the view is made as `as_strided` makes it, without that function's way through the
  // dispatcher, which costs more than all of the checks above.
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(ckv.storage()),
                                                             ckv.key_set(), ckv.dtype());
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(ckv.storage_offset());
  const int64_t sizes[] = {ckv.size(0), ckv.size(1), width}, strides[] = {ckv.size(1) * width, width, 1};
  impl->set_sizes_and_strides(at::IntArrayRef(sizes), at::IntArrayRef(strides));
  return view;
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def("mla_kv_view(Tensor(a) ckv, Tensor kpe) -> Tensor(a)?");
  m.impl("mla_kv_view", c10::DispatchKey::CompositeExplicitAutograd, &fi::mla_kv_view_shim);
}
