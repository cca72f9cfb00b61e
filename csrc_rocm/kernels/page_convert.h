// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Conversion of KV pages, in place or from one pool to another, all layers in one launch.
//
// A page is `half_bytes` bytes in its K plane followed by `half_bytes` in its V plane. A one-plane pool is described
// by v = k + half_bytes. Page p of layer l has its halves at k[l] + p * k_stride and v[l] + p * v_stride (bytes).
#pragma once

#include "kernels/common/fault.h"
#include "kernels/common/fp8.h"

namespace fi {

// Pointers travel by value in the kernel argument (2 KiB a pool): no host-to-device copy per call.
constexpr int kMaxLayers = 128;

enum class PageKind : int32_t {
  kStandard = 0,  // [H, N, 2D], per token K then V
  kShuffled = 1,  // K [H, D/x, N, x], V [H, N/x, D, x]
  kXPacked = 2,   // K [H, D/x, N, x], V [H, D, N]
  kSplitHnd = 3,  // K [H, N, D], V alike
  kSplitNhd = 4,  // K [N, H, D], V alike
};

// How a page's bytes are arranged. A page may be a grid of smaller ones: token blocks of `tokens`, each of pieces of
// `heads`, each piece a whole little page of `kind`. That is what several remote pages, or the head slices of several
// ranks, look like when they have been read side by side into one local page.
struct PageLayout {
  PageKind kind;
  int32_t heads;
  int32_t tokens;
};

struct Planes {
  uint8_t* k[kMaxLayers];
  uint8_t* v[kMaxLayers];
  int64_t k_stride;
  int64_t v_stride;
  IndexArray ids;     // [num_blocks]
  int64_t num_pages;  // pages in each pool
};

struct ConvertParams {
  Planes from;
  Planes to;  // the same as `from` in place
  int64_t num_blocks;
  Fault* fault;
  uint8_t* scratch;   // generic kernel in place: scratch_pages pages of 2 * half_bytes
  unsigned* tickets;  // fast kernel in place, pages larger than a workgroup's tile: 1 + kTicketRing counters
  int32_t scratch_pages;
  int32_t num_layers;
  int32_t num_heads;      // H
  int32_t page_size;      // N
  int32_t head_dim;       // D
  int32_t element_bytes;  // 1, 2 or 4
  PageLayout src;
  PageLayout dst;
  Recode recode;
  bool in_place;
};

constexpr int64_t kOpConvert = 3;
constexpr int kMaxGroups = 64;     // pages up to 4 MiB; every supported GPU holds at least that many workgroups at once
constexpr int kTicketRing = 4095;  // counters of pages in conversion, reused in a ring; with the ticket itself 16 KiB

constexpr int kPagesAtOnce = 2;    // of a workgroup of the generic kernel
constexpr int kGroupsPerUnit = 2;  // workgroups of the generic kernel in place, to a compute unit or multiprocessor

// Scratch of the generic kernel, for two workgroups on each of 304 units, within 128 MiB, which the last-level caches
// of gfx942 and gfx950 (256 MiB) keep.
inline int32_t scratch_pages(int64_t half_bytes) {
  const int64_t fits = (int64_t{128} << 20) / (2 * half_bytes * kPagesAtOnce), most = 304 * kGroupsPerUnit;
  return kPagesAtOnce * static_cast<int32_t>(fits < 1 ? 1 : fits > most ? most : fits);
}

// The one definition of layouts on this side of the language border: the byte offset of element (kv, h, n, d).
struct PageGeometry {
  int32_t H, N, D, e;

  FI_HOST_DEVICE int64_t half_bytes() const { return int64_t(H) * N * D * e; }

  FI_HOST_DEVICE int64_t offset(const PageLayout& layout, int kv, int h, int n, int d) const {
    // Most pages are one piece; the branch is uniform and saves the divisions.
    if (layout.heads == H && layout.tokens == N) return offset_in_piece(layout.kind, kv, h, n, d);
    const int piece = n / layout.tokens * (H / layout.heads) + h / layout.heads;
    const PageGeometry inner{layout.heads, layout.tokens, D, e};
    return piece * 2 * inner.half_bytes() +
           inner.offset_in_piece(layout.kind, kv, h % layout.heads, n % layout.tokens, d);
  }

  // The inverse: coordinates of element `i` (of a page of `2 * H * N * D` elements).
  FI_HOST_DEVICE void locate(const PageLayout& layout, int i, int* kv, int* h, int* n, int* d) const {
    if (layout.heads == H && layout.tokens == N) return locate_in_piece(layout.kind, i, kv, h, n, d);
    const int elements = 2 * layout.heads * layout.tokens * D, piece = i / elements, pieces = H / layout.heads;
    const PageGeometry inner{layout.heads, layout.tokens, D, e};
    inner.locate_in_piece(layout.kind, i - piece * elements, kv, h, n, d);
    *n += piece / pieces * layout.tokens;
    *h += piece % pieces * layout.heads;
  }

  // Source of elements that lie side by side in `dst`, from its element `i` on: the byte offset of the first in a page
  // of `src`, and the step from one to the next within a vector.
  FI_HOST_DEVICE void source_of(const PageLayout& src, const PageLayout& dst, int i, int64_t* first,
                                int64_t* step) const {
    int kv, h, n, d;
    locate(dst, i, &kv, &h, &n, &d);
    *first = offset(src, kv, h, n, d);
    // x elements of V are x tokens where V is transposed, else x head dimensions, as in K everywhere.
    const bool tokens = kv == 1 && (dst.kind == PageKind::kShuffled || dst.kind == PageKind::kXPacked);
    *step = tokens ? (n + 1 < N ? offset(src, kv, h, n + 1, d) - *first : 0)
                   : (d + 1 < D ? offset(src, kv, h, n, d + 1) - *first : 0);
  }

 private:
  FI_HOST_DEVICE int64_t offset_in_piece(PageKind kind, int kv, int h, int n, int d) const {
    const int x = 16 / e;
    int64_t i = 0;  // element index inside the half, or for kStandard inside the piece
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

  FI_HOST_DEVICE void locate_in_piece(PageKind kind, int i, int* kv, int* h, int* n, int* d) const {
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
};

inline uint64_t address_bits(const Planes& planes, int layers) {
  uint64_t bits = uint64_t(planes.k_stride) | uint64_t(planes.v_stride);
  for (int layer = 0; layer < layers; ++layer) {
    bits |= reinterpret_cast<uint64_t>(planes.k[layer]) | reinterpret_cast<uint64_t>(planes.v[layer]);
  }
  return bits;
}

// Elements that the generic kernels move at a time: a vector, where every vector of the destination holds elements of
// one row of one piece and all addresses allow it, else one element.
inline int convert_run(const ConvertParams& p) {
  const int x = 16 / p.element_bytes;
  const bool whole = p.head_dim % x == 0 && p.src.tokens % x == 0 && p.dst.tokens % x == 0;
  return whole ? x : 1;
}

inline bool convert_is_aligned(const ConvertParams& p) {
  return (address_bits(p.from, p.num_layers) | address_bits(p.to, p.num_layers)) % 16 == 0 && convert_run(p) > 1;
}

// Workgroups of 64 KiB of registers that a page takes in the fast kernel.
inline int convert_groups(const ConvertParams& p) {
  const int64_t page_bytes = int64_t(2) * p.num_heads * p.page_size * p.head_dim * p.element_bytes;
  return static_cast<int>((page_bytes + 65535) / 65536);
}

// Whether the fast GPU kernel takes a call: `standard` <-> `shuffled`, 1- and 2-byte elements, the common head
// dimensions. Pieces of `standard` by heads are the whole page, head after head; token blocks need 16 tokens. In place
// the caller owes it `tickets` where convert_groups() > 1, and owes the generic kernel `scratch`.
inline bool convert_is_fast(const ConvertParams& p) {
  const bool forward = p.src.kind == PageKind::kStandard && p.dst.kind == PageKind::kShuffled;
  const bool backward = p.src.kind == PageKind::kShuffled && p.dst.kind == PageKind::kStandard;
  const PageLayout& shuffled = forward ? p.dst : p.src;
  const PageLayout& standard = forward ? p.src : p.dst;
  const bool pieces = shuffled.heads == p.num_heads && shuffled.tokens == p.page_size && standard.tokens % 16 == 0;
  const int D = p.head_dim;
  const bool shape = p.page_size % 16 == 0 && (D == 64 || D == 128 || D == 256);
  return (forward || backward) && pieces && shape && p.element_bytes <= 2 && p.from.num_pages > 0 &&
         p.to.num_pages > 0 && convert_is_aligned(p) && convert_groups(p) <= kMaxGroups;
}

// Code of a bad id in the pool that is read.
FI_HOST_DEVICE FaultCode read_fault(const ConvertParams& p) { return p.in_place ? kBlockIdRange : kSourceIdRange; }

// Nothing to do: the pages are what they shall be.
inline bool convert_is_identity(const ConvertParams& p) {
  return p.in_place && p.recode == Recode::kKeep && p.src.kind == p.dst.kind && p.src.heads == p.dst.heads &&
         p.src.tokens == p.dst.tokens;
}

int convert_kv_pages(const ConvertParams& params, void* stream);

}  // namespace fi
