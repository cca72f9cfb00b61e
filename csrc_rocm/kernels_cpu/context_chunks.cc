// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/context_chunks.h"

#include <cstddef>

namespace fi {
namespace {

class Cutter {
 public:
  Cutter(ContextCuts& cuts, int64_t budget, int64_t alignment)
      : cuts_(cuts), budget_(budget), alignment_(alignment), room_(budget) {}

  void add(int64_t request, int64_t context) {
    if (context == 0) {
      if (!open_) return;
      cuts_.pieces.push_back({request, 0, 0});
      ++trailing_;
      return;
    }
    for (int64_t done = 0; done < context;) {
      if (!open_) {
        cuts_.chunks.push_back({request, static_cast<int64_t>(cuts_.pieces.size()), 0, done > 0});
        open_ = true;
      }
      const int64_t left = context - done;
      const int64_t take = left <= room_ ? left : room_ / alignment_ * alignment_;
      if (take > 0) {
        cuts_.pieces.push_back({request, done, take});
        trailing_ = 0;
        done += take;
        room_ -= take;
      }
      if (done < context) close();
    }
  }

  // A chunk ends with its last context.
  void close() {
    if (!open_) return;
    cuts_.pieces.resize(cuts_.pieces.size() - static_cast<size_t>(trailing_));
    ContextChunk& chunk = cuts_.chunks.back();
    chunk.pieces = static_cast<int64_t>(cuts_.pieces.size()) - chunk.first_piece;
    open_ = false;
    trailing_ = 0;
    room_ = budget_;
  }

 private:
  ContextCuts& cuts_;
  const int64_t budget_;
  const int64_t alignment_;
  int64_t room_;
  int64_t trailing_ = 0;  // requests without context at the end of the open chunk
  bool open_ = false;
};

}  // namespace

ContextCuts cut_contexts(const int64_t* contexts, int64_t requests, int64_t budget, int64_t alignment) {
  ContextCuts cuts;
  cuts.pieces.reserve(static_cast<size_t>(requests));
  Cutter cutter(cuts, budget, alignment);
  for (int64_t b = 0; b < requests; ++b) cutter.add(b, contexts[b]);
  cutter.close();
  return cuts;
}

}  // namespace fi
