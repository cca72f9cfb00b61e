// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Calls AITER with its own headers at hand. `fi_config.h` holds what flashinfer/jit/aiter_lib.py read in these headers:
//   FI_AITER_TORCH      tensors are torch's (to 0.1.13), and so is the stream; else `aiter_tensor_t`
//   FI_AITER_STREAM     there is a thread-local stream (from 0.1.12)
//   FI_AITER_CAN_THROW  a failed check aborts the process unless a thread-local variable lets it throw (0.1.12.post2)
#include "aiter/entry.h"

#include <cstring>
#include <exception>
#include <string>

#include "fi_config.h"
#include "kernels/common/launch_status.h"

#if FI_AITER_CAN_THROW
#include <aiter_hip_common.h>
#endif
#if FI_AITER_STREAM
#include <aiter_stream.h>
#endif
#include <cache.h>

namespace fi {
namespace {

// AITER's thread-local state for the length of a call; what was there comes back, as the thread may be in the middle of
// another call of AITER's.
class AiterState {
 public:
  explicit AiterState([[maybe_unused]] void* stream) {
#if FI_AITER_STREAM
    stream_ = aiter::getCurrentHIPStream();
    aiter::setCurrentHIPStream(static_cast<Stream>(stream));
#endif
#if FI_AITER_CAN_THROW
    can_throw_ = aiter_detail::g_aiter_can_throw;
    aiter_detail::g_aiter_can_throw = true;
#endif
  }
  ~AiterState() {
#if FI_AITER_STREAM
    aiter::setCurrentHIPStream(stream_);
#endif
#if FI_AITER_CAN_THROW
    aiter_detail::g_aiter_can_throw = can_throw_;
#endif
  }
  AiterState(const AiterState&) = delete;
  AiterState& operator=(const AiterState&) = delete;

 private:
#if FI_AITER_STREAM
  using Stream = decltype(aiter::getCurrentHIPStream());
  Stream stream_;
#endif
#if FI_AITER_CAN_THROW
  bool can_throw_;
#endif
};

#if FI_AITER_TORCH

// The type is read off AITER's declaration, so that no header of torch is named here.
template <typename Tensor, typename... Rest>
Tensor first_parameter(void (*)(Tensor&, Rest...));
using Tensor = decltype(first_parameter(&aiter::reshape_and_cache_flash));

class Argument {
 public:
  Argument(const AiterTensorArg& a, int) : tensor_(*static_cast<Tensor*>(const_cast<void*>(a.tensor))) {}
  operator Tensor&() { return tensor_; }

 private:
  Tensor& tensor_;
};

constexpr int kTypes[] = {0, 0, 0};
constexpr int kInt64 = 0, kFloat = 0;

#else

class Argument {
 public:
  Argument(const AiterTensorArg& a, AiterDtype type, int device) : tensor_{} {
    tensor_.ptr = a.data;
    tensor_.numel_ = static_cast<size_t>(a.numel);
    tensor_.ndim = a.rank;
    for (int i = 0; i < a.rank; ++i) {
      tensor_.shape[i] = a.sizes[i];
      tensor_.strides[i] = a.strides[i];
    }
    tensor_.dtype_ = type;
    tensor_.device_id = device;
  }
  operator aiter_tensor_t&() { return tensor_; }

 private:
  aiter_tensor_t tensor_;
};

constexpr AiterDtype kTypes[] = {AITER_DTYPE_fp32, AITER_DTYPE_fp16, AITER_DTYPE_bf16};
constexpr AiterDtype kInt64 = AITER_DTYPE_i64, kFloat = AITER_DTYPE_fp32;

#endif

void say(const char* text, char* message, size_t size) {
  if (size == 0) return;
  const size_t length = std::strlen(text) < size ? std::strlen(text) : size - 1;
  std::memcpy(message, text, length);
  message[length] = 0;
}

void run(const AiterAppend& c) {
#if FI_AITER_TORCH
  const auto argument = [](const AiterTensorArg& a, int type) { return Argument(a, type); };
#else
  const auto argument = [&c](const AiterTensorArg& a, AiterDtype type) { return Argument(a, type, c.device); };
#endif
  const auto rows = kTypes[static_cast<int>(c.type)];
  auto key = argument(c.key, rows), value = argument(c.value, rows);
  auto k_cache = argument(c.k_cache, rows), v_cache = argument(c.v_cache, rows);
  auto slots = argument(c.slots, kInt64), scale = argument(c.scale, kFloat);
  aiter::reshape_and_cache_flash(key, value, k_cache, v_cache, slots, "auto", scale, scale);
}

}  // namespace
}  // namespace fi

extern "C" int fi_aiter_reshape_and_cache_flash(const fi::AiterAppend* call, char* message,
                                                size_t message_size) noexcept {
  try {
    const fi::AiterState state(call->stream);
    fi::run(*call);
  } catch (const std::exception& e) {
    fi::say(e.what(), message, message_size);
    return fi::kRefused;
  } catch (...) {
    fi::say("an exception of no known type", message, message_size);
    return fi::kRefused;
  }
  // AITER does not look at the status of its launches.
  return fi::launch_status();
}
