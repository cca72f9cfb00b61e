// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Small kernels with known results, to prove the inspection and the emulator before real kernels rely on them.
#include <hip/hip_runtime.h>

struct ReverseParams {
  const unsigned* in;   // [gridDim.x * blockDim.x]
  unsigned* out;
  int count;
};

// Every workgroup reverses its words through LDS and swaps the halves of each with a byte permute.
extern "C" __global__ __launch_bounds__(256) void reverse_words(const ReverseParams p, unsigned xor_with) {
  __shared__ unsigned lds[256];
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  lds[threadIdx.x] = i < p.count ? p.in[i] : 0;
  __syncthreads();
  const unsigned word = lds[blockDim.x - 1 - threadIdx.x];
  if (i < p.count) p.out[i] = __builtin_amdgcn_perm(word, word, 0x01000302u) ^ xor_with;
}

// The same without its barrier: wrong, and the emulator must show it.
extern "C" __global__ __launch_bounds__(256) void reverse_words_racing(const ReverseParams p) {
  __shared__ unsigned lds[256];
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  lds[threadIdx.x] = p.in[i];
  p.out[i] = lds[blockDim.x - 1 - threadIdx.x];
}

// Workgroups wait for one another: each then writes what all have added.
extern "C" __global__ __launch_bounds__(64) void meet(unsigned* counter, unsigned* sums) {
  if (threadIdx.x == 0) atomicAdd(counter, blockIdx.x + 1);
  const unsigned all = gridDim.x * (gridDim.x + 1) / 2;
  while (__hip_atomic_load(counter, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) < all) {
  }
  sums[blockIdx.x * blockDim.x + threadIdx.x] = all + threadIdx.x;
}

// Lanes whose word is no place in LDS read nothing.
extern "C" __global__ __launch_bounds__(64) void read_some(const unsigned* in, unsigned* out) {
  __shared__ unsigned lds[64];
  lds[threadIdx.x] = threadIdx.x * 3;
  __syncthreads();
  const unsigned at = in[threadIdx.x];
  if (at < 64) out[threadIdx.x] = lds[at];
}

// Sums of a wave as reductions make them: inside of rows of 16 lanes, row by row, half by half. The last lane's is all.
extern "C" __global__ __launch_bounds__(64) void wave_sums(const unsigned* in, unsigned* out) {
  unsigned sum = in[threadIdx.x];
  sum += __builtin_amdgcn_update_dpp(0, sum, 0x118, 0xf, 0xf, true);
  sum += __builtin_amdgcn_update_dpp(0, sum, 0x114, 0xf, 0xf, true);
  sum += __builtin_amdgcn_update_dpp(0, sum, 0x112, 0xf, 0xf, true);
  sum += __builtin_amdgcn_update_dpp(0, sum, 0x111, 0xf, 0xf, true);
  out[threadIdx.x] = sum;
  sum += __builtin_amdgcn_update_dpp(0, sum, 0x142, 0xa, 0xf, false);
  out[64 + threadIdx.x] = sum;
  sum += __builtin_amdgcn_update_dpp(0, sum, 0x143, 0xf, 0xf, true);
  out[128 + threadIdx.x] = sum;
}

// Instructions on 16 bits with registers from v128 on, some lanes at rest; v2, v3, v22 and v23 must stay as they are.
extern "C" __global__ __launch_bounds__(64) void high_registers(const unsigned* in, unsigned* out) {
  const unsigned a = in[threadIdx.x], b = in[64 + threadIdx.x];
  unsigned difference, sum, wide, narrow, less, kept;
  asm volatile(
      "v_mov_b32 v130, %[a]\n"
      "v_mov_b32 v131, %[b]\n"
      "v_mov_b32 v150, 7\n"
      "v_mov_b32 v151, 7\n"
      "v_mov_b32 v2, 3\n"
      "v_mov_b32 v3, 3\n"
      "v_mov_b32 v22, 3\n"
      "v_mov_b32 v23, 3\n"
      "v_mov_b32 v200, 7\n"
      "s_mov_b64 s[40:41], exec\n"
      "s_mov_b32 exec_lo, 0xaaaaaaaa\n"
      "s_mov_b32 exec_hi, 0x0ff0ffff\n"
      "v_sub_u16_e32 v150, v130, v131\n"
      "v_add_u16_e32 v131, 0x1234, v131\n"
      "v_cvt_f32_f16_e32 v200, v130\n"
      "v_cvt_f16_f32_e32 v151, v200\n"
      "v_cmp_lt_u16_e32 vcc, v130, v131\n"
      "s_mov_b64 exec, s[40:41]\n"
      "v_cndmask_b32_e64 %[less], 0, 1, vcc\n"
      "v_mov_b32 %[difference], v150\n"
      "v_mov_b32 %[sum], v131\n"
      "v_mov_b32 %[wide], v200\n"
      "v_mov_b32 %[narrow], v151\n"
      "v_add3_u32 %[kept], v2, v3, v22\n"
      "v_add_u32_e32 %[kept], %[kept], v23\n"
      : [difference] "=&v"(difference), [sum] "=&v"(sum), [wide] "=&v"(wide), [narrow] "=&v"(narrow),
        [less] "=&v"(less), [kept] "=&v"(kept)
      : [a] "v"(a), [b] "v"(b)
      : "v2", "v3", "v22", "v23", "v130", "v131", "v150", "v151", "v200", "s40", "s41", "vcc");
  const unsigned results[] = {difference, sum, wide, narrow, less, kept};
  for (int i = 0; i < 6; ++i) out[i * 64 + threadIdx.x] = results[i];
}

// The floats of a word's four FP8 numbers, two at a time and one by one.
extern "C" __global__ __launch_bounds__(64) void from_fp8(const int* in, float* out) {
  const int word = in[threadIdx.x];
  typedef float Pair __attribute__((ext_vector_type(2)));
  const Pair low = __builtin_amdgcn_cvt_pk_f32_fp8(word, false), high = __builtin_amdgcn_cvt_pk_f32_fp8(word, true);
  float* const mine = out + threadIdx.x * 8;
  mine[0] = low.x, mine[1] = low.y, mine[2] = high.x, mine[3] = high.y;
  mine[4] = __builtin_amdgcn_cvt_f32_fp8(word, 0);
  mine[5] = __builtin_amdgcn_cvt_f32_fp8(word, 1);
  mine[6] = __builtin_amdgcn_cvt_f32_fp8(word, 2);
  mine[7] = __builtin_amdgcn_cvt_f32_fp8(word, 3);
}

struct alignas(16) Vector {
  unsigned w[4];
};

// One 16-byte load and store a lane.
extern "C" __global__ void copy_wide(const Vector* in, Vector* out) { out[threadIdx.x] = in[threadIdx.x]; }

// A pointer read from memory has no known address space: a flat access.
extern "C" __global__ void copy_flat(const unsigned* const* in, unsigned* const* out) {
  out[blockIdx.x][threadIdx.x] = in[blockIdx.x][threadIdx.x];
}

// Indexing registers by a run-time value: scratch memory.
extern "C" __global__ void use_scratch(const unsigned* in, unsigned* out, int at) {
  unsigned held[64];
  for (int i = 0; i < 64; ++i) held[(i * at) & 63] = in[threadIdx.x * 64 + i];
  out[threadIdx.x] = held[at & 63];
}
