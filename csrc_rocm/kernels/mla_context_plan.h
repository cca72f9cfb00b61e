// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// How the contexts of a batch are cut into chunks that fit a workspace; read by flashinfer/mla_context_planner.py. A
// chunk holds pieces of the contexts of consecutive requests, those without context in between included. The int32
// words that go to the device:
//
//   batch + 1     where the query tokens of each request begin
//   pieces        request of each piece, over all chunks
//   pieces        its first token in its request
//   pieces + 1    where its tokens begin among those of all chunks
//   for each chunk of n pieces:
//     n + 1       where the query tokens of its requests begin, counted from its first request's
//     n + 1       where its pieces' tokens begin
#pragma once

#include <cstdint>

namespace fi {

enum MlaContextPlanFault : int64_t {
  kMlaContextGood = 0,
  kMlaContextNegative = 1,  // a negative context length
  kMlaContextQoStart = 2,   // qo_indptr[0] is not 0
  kMlaContextQoFalls = 3,   // qo_indptr falls at a request
  kMlaContextBudget = 4,    // a chunk does not hold one page
  kMlaContextTotal = 5,     // more tokens than int32 counts
  kMlaContextShort = 6,     // words or chunks do not fit; the report says how many are needed
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
  int64_t indptrs_at;   // word at which its two indptrs begin
  int64_t token_begin;  // its first token among those of all chunks
};

struct MlaContextPlanReport {
  int64_t fault;
  int64_t where;
  int64_t value;
  int64_t bound;
  int64_t words;
  int64_t chunks;
  int64_t pieces;
  int64_t tokens;
  int64_t longest;  // context
  int64_t max_q_len;
};

struct MlaContextPlanParams {
  const int32_t* qo_indptr;  // [batch + 1]
  const int32_t* contexts;   // [batch]
  int64_t batch;
  int64_t budget;     // tokens of a chunk
  int64_t alignment;  // pieces begin at multiples of it in their contexts
  int32_t* words;
  int64_t word_capacity;
  MlaContextChunk* chunks;
  int64_t chunk_capacity;
  MlaContextPlanReport* report;
};

// Writes words and chunks only if the report has no fault.
void plan_mla_context(const MlaContextPlanParams& params);

}  // namespace fi
