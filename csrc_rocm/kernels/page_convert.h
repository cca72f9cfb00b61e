// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// In-place conversion of KV pages, all layers in one launch.
//
// A page is `half_bytes` bytes in its K plane followed by `half_bytes` in its V plane. A one-plane pool is
// described by v = k + half_bytes. Page p of layer l has its halves at k[l] + p * k_stride and v[l] + p *
// v_stride (bytes).
#pragma once

#include "kernels/common/fault.h"

namespace fi {

// 2 KiB of pointers travel by value in the kernel argument: no host-to-device copy per call.
constexpr int kMaxLayers = 128;

enum class PageKind : int32_t {
  kStandard = 0,  // [H, N, 2D], per token K then V
  kShuffled = 1,  // K [H, D/x, N, x], V [H, N/x, D, x]
  kXPacked = 2,   // K [H, D/x, N, x], V [H, D, N]
  kSplitHnd = 3,  // K [H, N, D], V alike
  kSplitNhd = 4,  // K [N, H, D], V alike
};

struct PlaneTable {
  uint8_t* k[kMaxLayers];
  uint8_t* v[kMaxLayers];
};

struct ConvertParams {
  PlaneTable planes;
  int64_t k_stride;
  int64_t v_stride;
  IndexArray block_ids;  // [num_blocks]
  int64_t num_blocks;
  int64_t num_pages;  // pages in each pool
  Fault* fault;
  uint8_t* scratch;   // generic kernel: scratch_pages pages of 2 * half_bytes
  unsigned* tickets;  // fast kernel, pages larger than a workgroup's tile: see page_convert.cu
  int32_t scratch_pages;
  int32_t num_layers;
  int32_t num_heads;      // H
  int32_t page_size;      // N
  int32_t head_dim;       // D
  int32_t element_bytes;  // 1, 2 or 4
  int32_t src;            // PageKind
  int32_t dst;
};

constexpr int64_t kOpConvert = 3;
constexpr int kMaxGroups = 64;     // pages up to 4 MiB; every supported GPU holds at least that many workgroups at once
constexpr int kTicketRing = 4095;  // counters of pages in conversion, reused in a ring; with the ticket itself 16 KiB

// Workgroups of the generic kernel, each with a scratch page: enough to fill a machine of 304 units three
// times over, within 128 MiB, which the last-level caches of gfx942 and gfx950 (256 MiB) keep.
inline int32_t scratch_pages(int64_t half_bytes) {
  const int64_t fits = (int64_t{128} << 20) / (2 * half_bytes);
  return static_cast<int32_t>(fits < 1 ? 1 : fits > 912 ? 912 : fits);
}

// The one definition of a page's layout on this side of the language border: the byte offset of element (kv,
// h, n, d).
struct PageGeometry {
  int32_t H, N, D, e;

  FI_HOST_DEVICE int64_t half_bytes() const { return int64_t(H) * N * D * e; }

  FI_HOST_DEVICE int64_t offset(PageKind kind, int kv, int h, int n, int d) const {
    const int x = 16 / e;
    int64_t i = 0;  // element index inside the half, or for kStandard inside the page
    switch (kind) {
      case PageKind::kStandard:
        return ((int64_t(h) * N + n) * 2 * D + kv * D + d) * e;
      case PageKind::kShuffled:
        i = kv == 0 ? ((int64_t(h) * (D / x) + d / x) * N + n) * x + d % x
                    : ((int64_t(h) * (N / x) + n / x) * D + d) * x + n % x;
        break;
      case PageKind::kXPacked:
        i = kv == 0 ? ((int64_t(h) * (D / x) + d / x) * N + n) * x + d % x : (int64_t(h) * D + d) * N + n;
        break;
      case PageKind::kSplitHnd:
        i = (int64_t(h) * N + n) * D + d;
        break;
      case PageKind::kSplitNhd:
        i = (int64_t(n) * H + h) * D + d;
        break;
    }
    return kv * half_bytes() + i * e;
  }

  // The inverse: coordinates of element `i` (of a page of `2 * H * N * D` elements).
  FI_HOST_DEVICE void locate(PageKind kind, int i, int* kv, int* h, int* n, int* d) const {
    const int x = 16 / e;
    if (kind == PageKind::kStandard) {
      *d = i % D;
      *kv = i / D % 2;
      *n = i / (2 * D) % N;
      *h = i / (2 * D) / N;
      return;
    }
    *kv = i >= H * N * D ? 1 : 0;
    i -= *kv * H * N * D;
    if (kind == PageKind::kSplitHnd || kind == PageKind::kSplitNhd) {
      *d = i % D;
      const int row = i / D;
      *n = kind == PageKind::kSplitHnd ? row % N : row / H;
      *h = kind == PageKind::kSplitHnd ? row / N : row % H;
    } else if (*kv == 0) {
      *n = i / x % N;
      *d = i / (x * N) % (D / x) * x + i % x;
      *h = i / (N * D);
    } else if (kind == PageKind::kShuffled) {
      *d = i / x % D;
      *n = i / (x * D) % (N / x) * x + i % x;
      *h = i / (N * D);
    } else {
      *n = i % N;
      *d = i / N % D;
      *h = i / (N * D);
    }
  }

  // Whether the x elements of a 16-byte vector of V are x tokens (else x head dimensions, as in K
  // everywhere).
  FI_HOST_DEVICE static bool v_runs_over_tokens(PageKind kind) {
    return kind == PageKind::kShuffled || kind == PageKind::kXPacked;
  }

  // Source of `count` elements that lie side by side in `dst`, from its element `i` on: the byte offset of
  // the first in a `src` page, and the step from one to the next.
  FI_HOST_DEVICE void source_of(PageKind src, PageKind dst, int i, int64_t* first, int64_t* step) const {
    int kv, h, n, d;
    locate(dst, i, &kv, &h, &n, &d);
    *first = offset(src, kv, h, n, d);
    const bool tokens = kv == 1 && v_runs_over_tokens(dst);
    *step = tokens ? (n + 1 < N ? offset(src, kv, h, n + 1, d) - *first : 0)
                   : (d + 1 < D ? offset(src, kv, h, n, d + 1) - *first : 0);
  }
};

// 16-byte access is possible everywhere.
inline bool convert_is_aligned(const ConvertParams& p) {
  uint64_t bits = uint64_t(p.k_stride) | uint64_t(p.v_stride);
  for (int layer = 0; layer < p.num_layers; ++layer) {
    bits |= reinterpret_cast<uint64_t>(p.planes.k[layer]) | reinterpret_cast<uint64_t>(p.planes.v[layer]);
  }
  const int x = 16 / p.element_bytes;
  return bits % 16 == 0 && p.head_dim % x == 0 && p.page_size % x == 0;
}

// Workgroups of 64 KiB of registers that a page takes in the fast kernel.
inline int convert_groups(const ConvertParams& p) {
  const int64_t page_bytes = int64_t(2) * p.num_heads * p.page_size * p.head_dim * p.element_bytes;
  return static_cast<int>((page_bytes + 65535) / 65536);
}

// Whether the fast GPU kernel takes a call: `standard` <-> `shuffled`, 1- and 2-byte elements, the common page sizes
// and head dimensions. The caller owes it `tickets` where convert_groups() > 1, and owes the generic kernel
// `scratch`.
inline bool convert_is_fast(const ConvertParams& p) {
  const bool pair = (p.src == int32_t(PageKind::kStandard) && p.dst == int32_t(PageKind::kShuffled)) ||
                    (p.src == int32_t(PageKind::kShuffled) && p.dst == int32_t(PageKind::kStandard));
  const int D = p.head_dim;
  const bool shape = p.page_size % 16 == 0 && (D == 64 || D == 128 || D == 256);
  return pair && shape && p.element_bytes <= 2 && p.num_pages > 0 && convert_is_aligned(p) &&
         convert_groups(p) <= kMaxGroups;
}

int convert_kv_pages(const ConvertParams& params, void* stream);

}  // namespace fi
