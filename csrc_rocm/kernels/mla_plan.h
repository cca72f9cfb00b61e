// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// How attention over ragged pages is cut into pieces of about equal cost, one list of them for each worker. The
// words are int32 and are read by flashinfer/backends/triton/kernels/mla.py:
//
//   workers + 1      where each worker's items begin
//   workers x 5      rows to merge: first query token, first row, query length, first slot, pieces (0: none)
//   items x 8        first query token, first row, query length, first entry of kv_indices, KV length, first key,
//                    one past the last key, slot (-1: the only piece, written to the result at once)
//
// Rows of a request are its query tokens times the heads. An item is a block of rows_per_item of them over a range of
// keys. A cut makes at most two pieces more, so there are never more than 2 * workers slots nor `workers` merges.
#pragma once

#include <cstdint>

namespace fi {

enum MlaPlanFault : int64_t {
  kMlaPlanGood = 0,
  kMlaQoStart = 1,    // qo_indptr[0] is not 0
  kMlaQoFalls = 2,    // qo_indptr falls at a request
  kMlaKvStart = 3,    // kv_indptr[0] is not 0
  kMlaKvFalls = 4,    // kv_indptr falls at a request
  kMlaKvLength = 5,   // a negative KV length
  kMlaPages = 6,      // a request has other than ceil(kv_len / page_size) pages
  kMlaPlanShort = 7,  // the schedule does not fit
  kMlaRange = 8,      // a number of more than 32 bits
};

struct MlaPlanReport {
  int64_t fault;
  int64_t where;  // request
  int64_t value;
  int64_t bound;
  int64_t words;  // of the schedule
  int64_t slots;  // of partial results
  int64_t max_q_len;
  int64_t total_kv;
  int64_t total_q;
  int64_t total_pages;
  int64_t shape;   // which of the shapes the batch is cut for
  int64_t unseen;  // requests with more queries than keys
};

// How to cut batches whose requests have at most `most_rows` rows.
struct MlaPlanShape {
  int64_t most_rows;
  int64_t rows_per_item;
  int64_t workers;
};

struct MlaPlanParams {
  const int32_t* qo_indptr;  // [batch + 1]
  const int32_t* kv_indptr;  // [batch + 1]
  const int32_t* kv_len;     // [batch]
  int64_t batch;
  int64_t heads;
  int64_t page_size;
  bool causal;
  const MlaPlanShape* shapes;  // by most_rows; the last takes every batch
  int64_t num_shapes;
  int32_t* last_page_len;  // [batch]
  int32_t* schedule;
  int64_t capacity;  // words
  MlaPlanReport* report;
};

void plan_mla(const MlaPlanParams& params);

}  // namespace fi
