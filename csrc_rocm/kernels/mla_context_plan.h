// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The plan of an MLA step's contexts; read by flashinfer/mla_context_planner.py. Its int32 words, which go to the
// device:
//
//   batch + 1     where the query tokens of each request begin
//   pieces        request of each piece, over all chunks
//   pieces        its first token in its request
//   pieces + 1    where its tokens begin among those of all chunks
//   for each chunk of n pieces:
//     n + 1       where the query tokens of its requests begin, counted from its first request's
//     n + 1       where its pieces' tokens begin
//
// Each of these begins on a multiple of 16 bytes: Triton compiles a kernel anew for a pointer that is aligned to less.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/common/fault.h"

namespace fi {

constexpr int64_t kMlaContextAlign = 4;  // words

inline int64_t mla_context_aligned(int64_t words) {
  return (words + kMlaContextAlign - 1) / kMlaContextAlign * kMlaContextAlign;
}

enum MlaContextPlanFault : int64_t {
  kMlaContextGood = 0,
  kMlaContextNegative = 1,  // a negative context length
  kMlaContextQoStart = 2,   // qo_indptr[0] is not 0
  kMlaContextQoFalls = 3,   // qo_indptr falls at a request
  kMlaContextBudget = 4,    // a chunk does not hold one page
  kMlaContextTotal = 5,     // more context tokens than int32 counts
  kMlaContextQueries = 6,   // more query tokens than int32 counts
};

struct MlaContextChunk {
  int64_t first;      // request
  int64_t pieces;     // consecutive requests
  int64_t tokens;     // of all pieces
  int64_t continues;  // whether the first piece continues that of the chunk before
  int64_t q_begin;    // query tokens of the requests
  int64_t q_end;
  int64_t max_q_len;
  int64_t max_kv_len;
};

struct MlaContextPlanParams {
  IndexArray qo_indptr;  // [batch + 1]
  IndexArray contexts;   // [batch]
  int64_t batch;
  int64_t budget;     // tokens of a chunk
  int64_t alignment;  // pieces begin at multiples of it in their contexts
};

struct MlaContextPlan {
  int64_t fault;  // with a fault there are neither words nor chunks
  int64_t where;
  int64_t value;
  int64_t bound;
  int64_t pieces;
  int64_t tokens;
  int64_t longest;  // context
  int64_t max_q_len;
  int64_t total_q;
  std::vector<int32_t> words;
  std::vector<MlaContextChunk> chunks;
};

MlaContextPlan plan_mla_context(const MlaContextPlanParams& params);

}  // namespace fi
