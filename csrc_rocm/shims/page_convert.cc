// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/page_convert.h. Arguments are checked here, as the op's check in
// flashinfer/ops/page_convert.py does in words.
#include "kernels/page_convert.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "shims/tensor.h"

namespace fi {
namespace {

int64_t half_bytes(const ConvertParams& p) {
  return PageGeometry{p.num_heads, p.page_size, p.head_dim, p.element_bytes}.half_bytes();
}

void require_plane(const at::Tensor& plane, const at::Tensor& first, int64_t bytes) {
  require(plane.dim() >= 2 && plane.size(0) == first.size(0));
  int64_t expected = 1;
  for (int64_t dim = plane.dim() - 1; dim > 0; --dim) {
    require(plane.size(dim) == 1 || plane.stride(dim) == expected);
    expected *= plane.size(dim);
  }
  require(expected * plane.element_size() == bytes && (plane.size(0) <= 1 || plane.stride(0) >= expected));
}

bool has_kind(const PageLayout& layout, int64_t head_dim, int64_t x) {
  if (layout.heads < 1 || layout.tokens < 1) return false;
  if (layout.kind == PageKind::kShuffled) return head_dim % x == 0 && layout.tokens % x == 0;
  return layout.kind != PageKind::kXPacked || head_dim % x == 0;
}

// One size is that of the whole page; the other divides it.
bool nests(int32_t a, int32_t b) { return a % b == 0 || b % a == 0; }

PageLayout page_layout(at::IntArrayRef kind_heads_tokens) {
  require(kind_heads_tokens.size() == 3);
  return {static_cast<PageKind>(kind_heads_tokens[0]), to_int32(kind_heads_tokens[1]), to_int32(kind_heads_tokens[2])};
}

// Everything but the pools. The whole page is as large as the larger layout.
ConvertParams convert_params(const at::Tensor& like, at::IntArrayRef src, at::IntArrayRef dst, int64_t head_dim,
                             int64_t recode, const at::Tensor& fault) {
  require(is_movable(like) && head_dim > 0 && recode >= 0 && recode <= 4 && (recode == 0 || like.element_size() == 1));
  ConvertParams p{};
  p.src = page_layout(src);
  p.dst = page_layout(dst);
  p.head_dim = to_int32(head_dim);
  p.element_bytes = to_int32(like.element_size());
  const int64_t x = 16 / p.element_bytes;
  require(has_kind(p.src, head_dim, x) && has_kind(p.dst, head_dim, x));
  require(nests(p.src.heads, p.dst.heads) && nests(p.src.tokens, p.dst.tokens));
  p.num_heads = std::max(p.src.heads, p.dst.heads);
  p.page_size = std::max(p.src.tokens, p.dst.tokens);
  const int64_t page = int64_t{p.num_heads} * p.page_size, limit = int64_t{1} << 30;
  require(page < limit && page * p.head_dim < limit && page * p.head_dim * p.element_bytes * 2 < limit);
  p.recode = static_cast<Recode>(recode);
  p.fault = fault_of(fault);
  return p;
}

// Bytes that two planes share would be converted twice. Pages of planes with one stride may take turns in memory.
void require_apart(at::TensorList planes, int64_t bytes) {
  std::vector<std::pair<int64_t, int64_t>> places;  // address and stride
  for (const at::Tensor& plane : planes) {
    places.emplace_back(reinterpret_cast<int64_t>(plane.const_data_ptr()), byte_stride(plane, 0));
  }
  std::sort(places.begin(), places.end());
  const int64_t last = planes[0].size(0) - 1;
  for (size_t i = 0; i < places.size(); ++i) {
    const auto [address, stride] = places[i];
    for (size_t j = i + 1; j < places.size() && places[j].first < address + last * stride + bytes; ++j) {
      require(last > 0 && places[j].second == stride);
      const int64_t apart = (places[j].first - address) % stride;
      require(apart >= bytes && stride - apart >= bytes);
    }
  }
}

// Pages at any stride, dense inside, `bytes` each, not overlapping; planes of one pool and their ids.
void require_pool(at::TensorList planes, int64_t planes_per_layer, const at::Tensor& ids, const at::Tensor& like,
                  int64_t page_bytes) {
  const auto count = static_cast<int64_t>(planes.size());
  require((planes_per_layer == 1 || planes_per_layer == 2) && count > 0 && count % planes_per_layer == 0);
  require(is_index_vector(ids, like.device()));
  require(planes[0].element_size() == like.element_size() && planes[0].device() == like.device());
  for (const at::Tensor& plane : planes) {
    require(is_alike(plane, planes[0]));
    require_plane(plane, planes[0], page_bytes / planes_per_layer);
  }
  if (planes[0].numel() > 0) require_apart(planes, page_bytes / planes_per_layer);
}

// Fills in layers from `layer` on while their strides are those of the first; returns the one after them.
int64_t fill_layers(at::TensorList planes, int64_t planes_per_layer, int64_t layer, int64_t half, Planes* to) {
  const auto plane = [&](int64_t at, int64_t which) -> const at::Tensor& {
    return planes[static_cast<size_t>(at * planes_per_layer + which)];
  };
  const int64_t last = planes_per_layer - 1, layers = static_cast<int64_t>(planes.size()) / planes_per_layer;
  to->k_stride = byte_stride(plane(layer, 0), 0);
  to->v_stride = byte_stride(plane(layer, last), 0);
  for (int64_t i = 0; layer < layers && i < kMaxLayers; ++layer, ++i) {
    if (byte_stride(plane(layer, 0), 0) != to->k_stride || byte_stride(plane(layer, last), 0) != to->v_stride) break;
    auto* k = static_cast<uint8_t*>(memory_to_write(plane(layer, 0)));
    to->k[i] = k;
    to->v[i] = last == 0 ? k + half : static_cast<uint8_t*>(memory_to_write(plane(layer, 1)));
  }
  return layer;
}

// Stream-ordered memory of a bounded size, whatever the request: a few scratch pages, or a ring of counters.
at::Tensor make_workspace(const at::Tensor& like, ConvertParams* p) {
  const auto bytes = like.options().dtype(at::kByte);
  at::Tensor workspace;
  if (like.is_cpu() || !p->in_place) return workspace;
  if (!convert_is_fast(*p)) {
    p->scratch_pages = scratch_pages(half_bytes(*p));
    workspace = at::empty({p->scratch_pages * 2 * half_bytes(*p)}, bytes);
    p->scratch = workspace.mutable_data_ptr<uint8_t>();
  } else if (convert_groups(*p) > 1) {
    workspace = at::zeros({1 + kTicketRing}, bytes.dtype(at::kInt));
    p->tickets = static_cast<unsigned*>(workspace.mutable_data_ptr());
  }
  return workspace;
}

// Params of a launch for every run of layers with equal strides, which is one launch as a rule. `like` has all but the
// layers; without `sources` pages are converted in place.
std::vector<ConvertParams> split_layers(const ConvertParams& like, at::TensorList sources, int64_t sources_per_layer,
                                        at::TensorList planes, int64_t planes_per_layer) {
  std::vector<ConvertParams> launches;
  const int64_t layers = static_cast<int64_t>(planes.size()) / planes_per_layer;
  for (int64_t layer = 0; layer < layers;) {
    ConvertParams& p = launches.emplace_back(like);
    int64_t next = fill_layers(planes, planes_per_layer, layer, half_bytes(p), &p.to);
    if (p.in_place) {
      p.from = p.to;
    } else {
      next = std::min(next, fill_layers(sources, sources_per_layer, layer, half_bytes(p), &p.from));
    }
    p.num_layers = to_int32(next - layer);
    layer = next;
  }
  return launches;
}

// On the device of `like`. On the CPU nothing follows a launch that reported a bad id.
void run(std::vector<ConvertParams> launches, const at::Tensor& like) {
  const c10::DeviceGuard guard(like.device());
  for (ConvertParams& p : launches) {
    const at::Tensor workspace = make_workspace(like, &p);
    check_launch(convert_kv_pages(p, current_stream(like)), "convert_kv_pages");
    if (like.is_cpu() && p.fault->code != kNoFault) return;
  }
}

// Everything but the layers, of a conversion in place.
ConvertParams in_place_params(at::TensorList planes, int64_t planes_per_layer, const at::Tensor& block_ids,
                              at::IntArrayRef src, at::IntArrayRef dst, int64_t head_dim, int64_t recode,
                              const at::Tensor& fault) {
  require(!planes.empty());
  ConvertParams p = convert_params(planes[0], src, dst, head_dim, recode, fault);
  require_pool(planes, planes_per_layer, block_ids, planes[0], 2 * half_bytes(p));
  p.in_place = true;
  p.num_blocks = block_ids.numel();
  p.to.ids = index_array(block_ids);
  p.to.num_pages = planes[0].size(0);
  return p;
}

void convert_kv_pages_shim(at::TensorList planes, int64_t planes_per_layer, const at::Tensor& block_ids,
                           at::IntArrayRef src, at::IntArrayRef dst, int64_t head_dim, int64_t recode,
                           const at::Tensor& fault) {
  const ConvertParams like = in_place_params(planes, planes_per_layer, block_ids, src, dst, head_dim, recode, fault);
  run(split_layers(like, {}, 1, planes, planes_per_layer), planes[0]);
}

void convert_kv_pages_into_shim(at::TensorList sources, int64_t sources_per_layer, const at::Tensor& source_ids,
                                at::TensorList planes, int64_t planes_per_layer, const at::Tensor& block_ids,
                                at::IntArrayRef src, at::IntArrayRef dst, int64_t head_dim, int64_t recode,
                                const at::Tensor& fault) {
  require(!sources.empty());
  ConvertParams like = in_place_params(planes, planes_per_layer, block_ids, src, dst, head_dim, recode, fault);
  require_pool(sources, sources_per_layer, source_ids, planes[0], 2 * half_bytes(like));
  require(static_cast<int64_t>(sources.size()) * planes_per_layer ==
          static_cast<int64_t>(planes.size()) * sources_per_layer);
  require(source_ids.numel() == block_ids.numel());
  like.in_place = false;
  like.from.ids = index_array(source_ids);
  like.from.num_pages = sources[0].size(0);
  run(split_layers(like, sources, sources_per_layer, planes, planes_per_layer), planes[0]);
}

// What convert_kv_pages makes of a pool, as bytes on the CPU: to be made once and run often.
void freeze_kv_pages_shim(at::TensorList planes, int64_t planes_per_layer, const at::Tensor& block_ids,
                          at::IntArrayRef src, at::IntArrayRef dst, int64_t head_dim, int64_t recode,
                          const at::Tensor& fault, const at::Tensor& frozen) {
  const ConvertParams like = in_place_params(planes, planes_per_layer, block_ids, src, dst, head_dim, recode, fault);
  const auto launches = split_layers(like, {}, 1, planes, planes_per_layer);
  const auto size = static_cast<int64_t>(launches.size() * sizeof(ConvertParams));
  frozen.resize_({size});
  std::memcpy(frozen.mutable_data_ptr(), launches.data(), static_cast<size_t>(size));
}

// The caller vouches for the pool: `frozen` holds addresses on the device of `block_ids`.
void convert_frozen_kv_pages_shim(const at::Tensor& frozen, const at::Tensor& block_ids, const at::Tensor& fault) {
  require(is_index_vector(block_ids, fault.device()));
  std::vector<ConvertParams> launches(static_cast<size_t>(frozen.numel()) / sizeof(ConvertParams));
  std::memcpy(launches.data(), frozen.const_data_ptr(), launches.size() * sizeof(ConvertParams));
  for (ConvertParams& p : launches) {
    p.num_blocks = block_ids.numel();
    p.from.ids = p.to.ids = index_array(block_ids);
    p.fault = fault_of(fault);
  }
  run(std::move(launches), block_ids);
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "convert_kv_pages(Tensor(a!)[] planes, int planes_per_layer, Tensor block_ids, int[] src, int[] dst, "
      "int head_dim, int recode, Tensor(b!) fault) -> ()");
  m.impl("convert_kv_pages", c10::DispatchKey::CompositeExplicitAutograd, &fi::convert_kv_pages_shim);
  m.def(
      "convert_kv_pages_into(Tensor[] sources, int sources_per_layer, Tensor source_ids, Tensor(a!)[] planes, "
      "int planes_per_layer, Tensor block_ids, int[] src, int[] dst, int head_dim, int recode, Tensor(b!) fault) -> "
      "()");
  m.impl("convert_kv_pages_into", c10::DispatchKey::CompositeExplicitAutograd, &fi::convert_kv_pages_into_shim);
  m.def(
      "freeze_kv_pages(Tensor[] planes, int planes_per_layer, Tensor block_ids, int[] src, int[] dst, int head_dim, "
      "int recode, Tensor fault, Tensor(a!) frozen) -> ()");
  m.impl("freeze_kv_pages", c10::DispatchKey::CompositeExplicitAutograd, &fi::freeze_kv_pages_shim);
  m.def("convert_frozen_kv_pages(Tensor frozen, Tensor block_ids, Tensor(a!) fault) -> ()");
  m.impl("convert_frozen_kv_pages", c10::DispatchKey::CompositeExplicitAutograd, &fi::convert_frozen_kv_pages_shim);
}
