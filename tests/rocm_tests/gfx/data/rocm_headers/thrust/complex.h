// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// What torch's headers name of rocThrust where hipcc compiles them. Nothing here calls the functions.
#pragma once

namespace thrust {

template <typename T>
struct complex {
  __host__ __device__ complex(T real = T(), T imag = T()) : real_(real), imag_(imag) {}
  __host__ __device__ T real() const { return real_; }
  __host__ __device__ T imag() const { return imag_; }

 private:
  T real_, imag_;
};

#define ROCM_HEADERS_FUNCTION(name) \
  template <typename T>               \
  __host__ __device__ complex<T> name(const complex<T>&);
ROCM_HEADERS_FUNCTION(exp)
ROCM_HEADERS_FUNCTION(log)
ROCM_HEADERS_FUNCTION(log10)
ROCM_HEADERS_FUNCTION(sqrt)
ROCM_HEADERS_FUNCTION(sin)
ROCM_HEADERS_FUNCTION(cos)
ROCM_HEADERS_FUNCTION(tan)
ROCM_HEADERS_FUNCTION(asin)
ROCM_HEADERS_FUNCTION(acos)
ROCM_HEADERS_FUNCTION(atan)
ROCM_HEADERS_FUNCTION(sinh)
ROCM_HEADERS_FUNCTION(cosh)
ROCM_HEADERS_FUNCTION(tanh)
ROCM_HEADERS_FUNCTION(asinh)
ROCM_HEADERS_FUNCTION(acosh)
ROCM_HEADERS_FUNCTION(atanh)
ROCM_HEADERS_FUNCTION(conj)
ROCM_HEADERS_FUNCTION(proj)
#undef ROCM_HEADERS_FUNCTION

template <typename T>
__host__ __device__ T abs(const complex<T>&);

template <typename T>
__host__ __device__ complex<T> polar(const T&, const T&);

template <typename T, typename U>
__host__ __device__ complex<T> pow(const T&, const U&);

}  // namespace thrust
