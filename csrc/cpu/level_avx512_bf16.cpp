// As level_avx512.cpp, with bf16 dot products (Zen 4, Cooper Lake and later). See level_avx2.cpp for the order of the includes.
#include <memory>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own headers pass undefined registers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")
#endif

using namespace sagc;

#define SAGC_BF16_INSTRUCTIONS

// clang-format off
#include "vec_avx512.h"
#include "dot_bf16.h"
#include "kernels_all.inl"
// clang-format on

const KernelTable sagc::kAvx512Bf16Kernels = SAGC_KERNEL_TABLE("avx512_bf16");

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
