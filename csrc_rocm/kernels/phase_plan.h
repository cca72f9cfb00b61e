// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The plan of a batch in which requests decode, extend and prefill; read by flashinfer/phase_plan.py.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/common/fault.h"

namespace fi {

enum PhasePlanFault : int64_t {
  kPhaseGood = 0,
  kPhaseQoStart = 1,   // qo_indptr[0] is not 0
  kPhaseKvStart = 2,   // kv_indptr[0] is not 0
  kPhaseQoFalls = 3,   // a request of fewer than no queries
  kPhaseKvFalls = 4,   // a request of fewer than no pages
  kPhaseTail = 5,      // last page of less than nothing, or of more than a page
  kPhasePages = 6,     // fewer tokens in pages than queries
  kPhaseBudget = 7,    // the workspace holds no page, and an extend has a context
  kPhaseLaunches = 8,  // more chunks than launches
  kPhaseRange = 9,     // more queries, pages or tokens of a request than int32 counts
};

// A run of words.
struct PhaseSpan {
  int64_t begin;
  int64_t end;
};

// One fetch, and the attention over what it brought.
struct PhaseLaunch {
  PhaseSpan requests;   // of the batch
  PhaseSpan rows;       // of queries, counted from the extends' first
  int64_t tokens;       // fetched
  PhaseSpan starts;     // words: where each request's piece begins in its context,
  PhaseSpan kv_indptr;  // where each piece begins among the fetched tokens,
  PhaseSpan qo_indptr;  // and where each request's queries begin, counted from `rows.begin`
};

struct PhasePlanParams {
  IndexArray qo_indptr;      // [batch + 1]
  IndexArray kv_indptr;      // [batch + 1]
  IndexArray last_page_len;  // [batch]
  int64_t batch;
  int64_t page_size;
  int64_t threshold;  // queries that a decode may have
  int64_t budget;     // tokens of context that the workspace holds; -1 if none is to be fetched
  int64_t launches;   // that there must be, those included that fetch nothing; -1 for as many as there are chunks
  bool widen;         // each launch takes all extends, those that take no part with pieces of no tokens
};

struct PhasePlan {
  int64_t fault;
  int64_t where;
  int64_t value;
  int64_t bound;
  int64_t requests[3];   // that decode, extend and prefill,
  int64_t tokens[3];     // and their queries
  int64_t max_q_len[3];  // the longest of each
  int64_t total_q;
  int64_t total_pages;
  PhaseSpan kv_indptr;
  PhaseSpan last_page_len;
  // Each phase's queries, counted from its own first row,
  PhaseSpan decode_qo;
  PhaseSpan extend_qo;
  PhaseSpan prefill_qo;
  // and with the requests before the phase as requests without queries.
  PhaseSpan extend_pages_qo;
  PhaseSpan prefill_pages_qo;
  // int32, for the device. Each span begins on a multiple of 16 bytes: Triton compiles a kernel anew for a pointer that
  // is aligned to less.
  std::vector<int32_t> words;
  std::vector<PhaseLaunch> launches;
};

PhasePlan plan_phases(const PhasePlanParams& params);

}  // namespace fi
