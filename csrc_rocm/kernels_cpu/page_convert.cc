// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Page conversion on the CPU: each page goes through a page-sized buffer of its thread. Block ids
// are checked first, duplicates included, so that a bad call changes nothing.
#include "kernels/page_convert.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace fi {
namespace {

// Ids of one pool; those that are written to must be distinct.
bool check_ids(const ConvertParams& p, const Planes& planes, FaultCode code, bool written) {
  std::vector<std::pair<int64_t, int64_t>> seen;  // (id, where)
  seen.reserve(static_cast<size_t>(p.num_blocks));
  for (int64_t i = 0; i < p.num_blocks; ++i) {
    const int64_t id = planes.ids[i];
    if (id < 0 || id >= planes.num_pages) {
      report(p.fault, kOpConvert << 8 | code, i, id, planes.num_pages);
      return false;
    }
    seen.emplace_back(id, i);
  }
  if (!written) return true;
  std::sort(seen.begin(), seen.end());
  for (size_t i = 1; i < seen.size(); ++i) {
    if (seen[i].first == seen[i - 1].first) {
      report(p.fault, kOpConvert << 8 | kBlockIdTwice, seen[i].second, seen[i].first, seen[i - 1].second);
      return false;
    }
  }
  return true;
}

// One row of x elements of the destination, gathered from the page's copy. `kBytes` is an element's size.
template <int kBytes>
void gather(const uint8_t* from, int64_t step, int count, uint8_t* to) {
  for (int j = 0; j < count; ++j) std::memcpy(to + j * kBytes, from + j * step, kBytes);
}

// The offsets are the same for every page: computed once for the call.
struct Run {
  int64_t first;
  int64_t step;
};

template <int kBytes>
void convert(const ConvertParams& p, const std::vector<Run>& runs, int count) {
  const PageGeometry g{p.num_heads, p.page_size, p.head_dim, p.element_bytes};
  const auto half = static_cast<size_t>(g.half_bytes());
  const int64_t width = int64_t(count) * kBytes;
#pragma omp parallel
  {
    std::vector<uint8_t> copy(2 * half), out(2 * half);
#pragma omp for schedule(static) collapse(2)
    for (int layer = 0; layer < p.num_layers; ++layer) {
      for (int64_t block = 0; block < p.num_blocks; ++block) {
        const int64_t from = p.from.ids[block], to = p.to.ids[block];
        std::memcpy(copy.data(), p.from.k[layer] + from * p.from.k_stride, half);
        std::memcpy(copy.data() + half, p.from.v[layer] + from * p.from.v_stride, half);
        for (size_t i = 0; i < runs.size(); ++i) {
          gather<kBytes>(copy.data() + runs[i].first, runs[i].step, count, out.data() + int64_t(i) * width);
        }
        if (kBytes == 1 && p.recode != Recode::kKeep) {
          for (uint8_t& byte : out) byte = recode_byte(p.recode, byte);
        }
        std::memcpy(p.to.k[layer] + to * p.to.k_stride, out.data(), half);
        std::memcpy(p.to.v[layer] + to * p.to.v_stride, out.data() + half, half);
      }
    }
  }
}

}  // namespace

int convert_kv_pages(const ConvertParams& p, void*) {
  if (!check_ids(p, p.from, read_fault(p), p.in_place) || (!p.in_place && !check_ids(p, p.to, kBlockIdRange, true)))
    return 0;
  if (p.num_blocks == 0 || p.num_layers == 0 || convert_is_identity(p)) return 0;
  const PageGeometry g{p.num_heads, p.page_size, p.head_dim, p.element_bytes};
  const int count = convert_run(p);
  std::vector<Run> runs(static_cast<size_t>(2 * g.half_bytes() / (int64_t(count) * p.element_bytes)));
  for (size_t i = 0; i < runs.size(); ++i) {
    g.source_of(p.src, p.dst, static_cast<int>(i) * count, &runs[i].first, &runs[i].step);
  }
  switch (p.element_bytes) {
    case 1:
      convert<1>(p, runs, count);
      break;
    case 2:
      convert<2>(p, runs, count);
      break;
    default:
      convert<4>(p, runs, count);
  }
  return 0;
}

}  // namespace fi
