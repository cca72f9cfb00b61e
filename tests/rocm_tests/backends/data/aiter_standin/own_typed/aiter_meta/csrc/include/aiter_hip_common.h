// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// A failed check of AITER's ends the process unless the thread's variable lets it throw.
#pragma once
#include <stdexcept>

namespace aiter_detail {
inline thread_local bool g_aiter_can_throw = false;
}

#define AITER_CHECK(x, text)                                         \
  do {                                                               \
    if (!(x)) {                                                      \
      if (!aiter_detail::g_aiter_can_throw) std::abort();            \
      throw std::runtime_error(std::string("[AITER] ") + text);      \
    }                                                                \
  } while (0)
