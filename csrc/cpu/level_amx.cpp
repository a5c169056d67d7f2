// AVX-512 with bf16 products on AMX tiles (Sapphire Rapids and later). See level_avx2.cpp for the order of the includes.
#include <memory>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,amx-tile,amx-bf16"))), \
                             apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own headers pass undefined registers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,amx-tile,amx-bf16")
#endif

using namespace sagc;

#define SAGC_BF16_INSTRUCTIONS

// clang-format off
#include "vec_avx512.h"
#include "vec_math.inl"
#include "linear_amx.inl"
// clang-format on

const KernelTable& sagc::amx_kernels() {
  static const KernelTable table = table_with_amx("amx", kAvx512Bf16Kernels);
  return table;
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
