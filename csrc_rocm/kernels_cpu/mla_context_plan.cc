// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Whole contexts are packed into a chunk while they fit; what does not is cut at a multiple of the alignment. In Python
// 256 requests take as long as a step's whole planning may.
#include "kernels/mla_context_plan.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <vector>

namespace fi {
namespace {

struct Piece {
  int64_t request;
  int64_t start;
  int64_t length;
};

// Pieces of all chunks one after the other, and the chunks with what can be told while cutting.
class Cutter {
 public:
  Cutter(int64_t budget, int64_t alignment) : budget_(budget), alignment_(alignment), room_(budget) {}

  void add(int64_t request, int64_t context) {
    if (context == 0) {
      if (!open()) return;
      pieces.push_back({request, 0, 0});
      ++trailing_;
      return;
    }
    for (int64_t done = 0; done < context;) {
      if (!open()) chunks.push_back({request, 0, 0, done > 0});
      const int64_t left = context - done;
      const int64_t take = left <= room_ ? left : room_ / alignment_ * alignment_;
      if (take > 0) {
        pieces.push_back({request, done, take});
        trailing_ = 0;
        done += take;
        room_ -= take;
      }
      if (done < context) close();
    }
  }

  // A chunk ends with its last context.
  void close() {
    if (!open()) return;
    pieces.resize(pieces.size() - static_cast<size_t>(trailing_));
    MlaContextChunk& chunk = chunks.back();
    chunk.pieces = static_cast<int64_t>(pieces.size()) - closed_;
    closed_ = static_cast<int64_t>(pieces.size());
    trailing_ = 0;
    room_ = budget_;
  }

  std::vector<Piece> pieces;
  std::vector<MlaContextChunk> chunks;

 private:
  bool open() const { return !chunks.empty() && chunks.back().pieces == 0; }

  const int64_t budget_;
  const int64_t alignment_;
  int64_t room_;
  int64_t closed_ = 0;    // pieces of the chunks before
  int64_t trailing_ = 0;  // requests without context at the end of the open chunk
};

bool refuse(MlaContextPlanReport* report, int64_t fault, int64_t where, int64_t value, int64_t bound) {
  *report = MlaContextPlanReport{fault, where, value, bound, 0, 0, 0, 0, 0, 0};
  return false;
}

bool check(const MlaContextPlanParams& p) {
  MlaContextPlanReport* report = p.report;
  *report = MlaContextPlanReport{};
  if (p.qo_indptr[0] != 0) return refuse(report, kMlaContextQoStart, 0, p.qo_indptr[0], 0);
  int64_t tokens = 0, longest = 0, max_q_len = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.qo_indptr[b + 1] < p.qo_indptr[b]) {
      return refuse(report, kMlaContextQoFalls, b, p.qo_indptr[b + 1], p.qo_indptr[b]);
    }
    if (p.contexts[b] < 0) return refuse(report, kMlaContextNegative, b, p.contexts[b], 0);
    tokens += p.contexts[b];
    longest = std::max<int64_t>(longest, p.contexts[b]);
    max_q_len = std::max(max_q_len, int64_t{p.qo_indptr[b + 1]} - p.qo_indptr[b]);
  }
  if (tokens > INT32_MAX) return refuse(report, kMlaContextTotal, 0, tokens, INT32_MAX);
  if (tokens > 0 && p.budget < p.alignment) return refuse(report, kMlaContextBudget, 0, p.budget, p.alignment);
  report->tokens = tokens;
  report->longest = longest;
  report->max_q_len = max_q_len;
  return true;
}

void write_chunk(const MlaContextPlanParams& p, const Piece* pieces, MlaContextChunk& chunk) {
  int32_t* qo = p.words + chunk.indptrs_at;
  int32_t* kv = qo + chunk.pieces + 1;
  const int32_t first = p.qo_indptr[chunk.first];
  chunk.q_begin = first;
  chunk.q_end = p.qo_indptr[chunk.first + chunk.pieces];
  int64_t tokens = 0;
  for (int64_t i = 0; i < chunk.pieces; ++i) {
    qo[i] = p.qo_indptr[chunk.first + i] - first;
    kv[i] = static_cast<int32_t>(tokens);
    tokens += pieces[i].length;
    const int64_t q_len = int64_t{p.qo_indptr[chunk.first + i + 1]} - p.qo_indptr[chunk.first + i];
    chunk.max_q_len = std::max(chunk.max_q_len, q_len);
    chunk.max_kv_len = std::max(chunk.max_kv_len, pieces[i].length);
  }
  qo[chunk.pieces] = p.qo_indptr[chunk.first + chunk.pieces] - first;
  kv[chunk.pieces] = static_cast<int32_t>(tokens);
  chunk.tokens = tokens;
}

}  // namespace

void plan_mla_context(const MlaContextPlanParams& p) {
  if (!check(p)) return;
  Cutter cutter(p.budget, p.alignment);
  for (int64_t b = 0; b < p.batch; ++b) cutter.add(b, p.contexts[b]);
  cutter.close();
  const auto pieces = static_cast<int64_t>(cutter.pieces.size());
  const auto chunks = static_cast<int64_t>(cutter.chunks.size());
  MlaContextPlanReport& report = *p.report;
  report.pieces = pieces;
  report.chunks = chunks;
  report.words = p.batch + 1 + 3 * pieces + 1 + 2 * (pieces + chunks);
  if (report.words > p.word_capacity || chunks > p.chunk_capacity) {
    report.fault = kMlaContextShort;
    return;
  }
  std::memcpy(p.words, p.qo_indptr, static_cast<size_t>(p.batch + 1) * sizeof(int32_t));
  int32_t* words = p.words + p.batch + 1;
  int64_t begin = 0;
  for (int64_t i = 0; i < pieces; ++i) {
    const Piece& piece = cutter.pieces[static_cast<size_t>(i)];
    words[i] = static_cast<int32_t>(piece.request);
    words[pieces + i] = static_cast<int32_t>(piece.start);
    words[2 * pieces + i] = static_cast<int32_t>(begin);
    begin += piece.length;
  }
  words[3 * pieces] = static_cast<int32_t>(begin);
  int64_t at = p.batch + 1 + 3 * pieces + 1, piece = 0, token = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    MlaContextChunk chunk = cutter.chunks[static_cast<size_t>(c)];
    chunk.indptrs_at = at;
    chunk.token_begin = token;
    write_chunk(p, cutter.pieces.data() + piece, chunk);
    at += 2 * (chunk.pieces + 1);
    piece += chunk.pieces;
    token += chunk.tokens;
    p.chunks[c] = chunk;
  }
}

}  // namespace fi
