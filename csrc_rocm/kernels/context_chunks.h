// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Cached contexts cut into chunks that fit a workspace. Attention over a context that was fetched piecewise is merged
// from the pieces, and the fewer launches the better: whole contexts are packed into a chunk while they fit. What does
// not fit is cut at a multiple of the alignment, the page size, so that later pieces begin on a page.
#pragma once

#include <cstdint>
#include <vector>

namespace fi {

// A run of one request's context; of no tokens if the request has none and lies between others of its chunk.
struct ContextPiece {
  int64_t request;
  int64_t start;
  int64_t length;
};

// Pieces of consecutive requests, the first and the last of them with tokens. Only the first piece may continue one of
// the chunk before.
struct ContextChunk {
  int64_t first;        // request
  int64_t first_piece;  // among those of all chunks
  int64_t pieces;
  bool continues;
};

struct ContextCuts {
  std::vector<ContextPiece> pieces;
  std::vector<ContextChunk> chunks;
};

// Cuts `contexts[0 .. requests)`, none of them negative, into chunks of at most `budget` tokens. `budget` holds an
// `alignment` at least if there is a context.
ContextCuts cut_contexts(const int64_t* contexts, int64_t requests, int64_t budget, int64_t alignment);

}  // namespace fi
