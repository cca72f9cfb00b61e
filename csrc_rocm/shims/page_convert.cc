// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/page_convert.h. Arguments are checked here, as the op's check in
// flashinfer/ops/page_convert.py does in words.
#include "kernels/page_convert.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "shims/tensor.h"

namespace fi {
namespace {

// Pages at any stride, dense inside, `bytes` each, not overlapping.
void require_plane(const at::Tensor& plane, const at::Tensor& first, int64_t bytes) {
  require(plane.dim() >= 2 && is_alike(plane, first) && plane.size(0) == first.size(0));
  int64_t expected = 1;
  for (int64_t dim = plane.dim() - 1; dim > 0; --dim) {
    require(plane.size(dim) == 1 || plane.stride(dim) == expected);
    expected *= plane.size(dim);
  }
  require(expected * plane.element_size() == bytes && (plane.size(0) <= 1 || plane.stride(0) >= expected));
}

bool has_kind(PageKind kind, int64_t page_size, int64_t head_dim, int64_t x) {
  if (kind == PageKind::kShuffled) return head_dim % x == 0 && page_size % x == 0;
  return kind != PageKind::kXPacked || head_dim % x == 0;
}

void require_convert(at::TensorList planes, int64_t planes_per_layer, const at::Tensor& block_ids,
                     const ConvertParams& p) {
  const at::Tensor& first = planes[0];
  const int64_t x = 16 / first.element_size();
  require(p.num_heads > 0 && p.page_size > 0 && p.head_dim > 0);
  require(has_kind(PageKind(p.src), p.page_size, p.head_dim, x) &&
          has_kind(PageKind(p.dst), p.page_size, p.head_dim, x));
  const int64_t page_bytes = 2 * PageGeometry{p.num_heads, p.page_size, p.head_dim, p.element_bytes}.half_bytes();
  require(page_bytes < int64_t{1} << 30 && is_index_vector(block_ids, first.device()));
  for (const at::Tensor& plane : planes) require_plane(plane, first, page_bytes / planes_per_layer);
}

// Layers from `layer` on that one launch takes: equal strides, at most kMaxLayers.
int64_t fill_layers(at::TensorList planes, int64_t planes_per_layer, int64_t layer, ConvertParams* p) {
  const auto plane = [&](int64_t at, int64_t which) -> const at::Tensor& {
    return planes[static_cast<size_t>(at * planes_per_layer + which)];
  };
  const int64_t last = planes_per_layer - 1, layers = static_cast<int64_t>(planes.size()) / planes_per_layer;
  const int64_t half = PageGeometry{p->num_heads, p->page_size, p->head_dim, p->element_bytes}.half_bytes();
  p->k_stride = byte_stride(plane(layer, 0), 0);
  p->v_stride = byte_stride(plane(layer, last), 0);
  p->num_layers = 0;
  for (; layer < layers && p->num_layers < kMaxLayers; ++layer, ++p->num_layers) {
    if (byte_stride(plane(layer, 0), 0) != p->k_stride || byte_stride(plane(layer, last), 0) != p->v_stride) break;
    auto* k = static_cast<uint8_t*>(plane(layer, 0).mutable_data_ptr());
    p->planes.k[p->num_layers] = k;
    p->planes.v[p->num_layers] = last == 0 ? k + half : static_cast<uint8_t*>(plane(layer, 1).mutable_data_ptr());
  }
  return layer;
}

// Stream-ordered memory of a bounded size, whatever the request: a few scratch pages, or a ring of counters.
at::Tensor make_workspace(const at::Tensor& like, ConvertParams* p) {
  const auto bytes = like.options().dtype(at::kByte);
  at::Tensor workspace;
  if (!like.is_cpu() && !convert_is_fast(*p)) {
    const int64_t half = PageGeometry{p->num_heads, p->page_size, p->head_dim, p->element_bytes}.half_bytes();
    p->scratch_pages = scratch_pages(half);
    workspace = at::empty({p->scratch_pages * 2 * half}, bytes);
    p->scratch = workspace.mutable_data_ptr<uint8_t>();
  } else if (!like.is_cpu() && convert_groups(*p) > 1) {
    workspace = at::zeros({1 + kTicketRing}, bytes.dtype(at::kInt));
    p->tickets = static_cast<unsigned*>(workspace.mutable_data_ptr());
  }
  return workspace;
}

void convert_kv_pages_shim(at::TensorList planes, int64_t planes_per_layer, const at::Tensor& block_ids, int64_t src,
                           int64_t dst, int64_t num_heads, int64_t page_size, int64_t head_dim,
                           const at::Tensor& fault) {
  const int64_t count = static_cast<int64_t>(planes.size());
  require((planes_per_layer == 1 || planes_per_layer == 2) && count > 0 && count % planes_per_layer == 0);
  require(is_movable(planes[0]));
  ConvertParams p{};
  p.num_heads = static_cast<int32_t>(num_heads);
  p.page_size = static_cast<int32_t>(page_size);
  p.head_dim = static_cast<int32_t>(head_dim);
  p.element_bytes = static_cast<int32_t>(planes[0].element_size());
  p.src = static_cast<int32_t>(src);
  p.dst = static_cast<int32_t>(dst);
  require_convert(planes, planes_per_layer, block_ids, p);
  const c10::DeviceGuard guard(planes[0].device());
  p.block_ids = index_array(block_ids);
  p.num_blocks = block_ids.numel();
  p.num_pages = planes[0].size(0);
  p.fault = fault_of(fault);
  for (int64_t layer = 0; layer < count / planes_per_layer;) {
    layer = fill_layers(planes, planes_per_layer, layer, &p);
    const at::Tensor workspace = make_workspace(planes[0], &p);
    check_launch(convert_kv_pages(p, current_stream(planes[0])), "convert_kv_pages");
    if (planes[0].is_cpu() && p.fault->code != kNoFault) return;
  }
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "convert_kv_pages(Tensor(a!)[] planes, int planes_per_layer, Tensor block_ids, int src, int dst, "
      "int num_heads, int page_size, int head_dim, Tensor(b!) fault) -> ()");
  m.impl("convert_kv_pages", c10::DispatchKey::CompositeExplicitAutograd, &fi::convert_kv_pages_shim);
}
