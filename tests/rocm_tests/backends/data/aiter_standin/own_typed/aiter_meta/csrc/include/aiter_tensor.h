// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Field for field AITER's tensor of 0.1.12 and later: 160 bytes.
#pragma once
#include <cstddef>
#include <cstdint>

typedef enum {
  AITER_DTYPE_fp8,
  AITER_DTYPE_fp8_e8m0,
  AITER_DTYPE_fp16,
  AITER_DTYPE_bf16,
  AITER_DTYPE_fp32,
  AITER_DTYPE_i4x2,
  AITER_DTYPE_fp4x2,
  AITER_DTYPE_u32,
  AITER_DTYPE_i32,
  AITER_DTYPE_i16,
  AITER_DTYPE_i8,
  AITER_DTYPE_u8,
  AITER_DTYPE_i64,
  AITER_DTYPE_u64,
} AiterDtype;

struct aiter_tensor_t {
  void* ptr;
  size_t numel_;
  int ndim;
  int64_t shape[8];
  int64_t strides[8];
  AiterDtype dtype_;
  int device_id;
};
static_assert(sizeof(aiter_tensor_t) == 160);
