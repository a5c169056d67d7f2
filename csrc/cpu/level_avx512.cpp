// Kernels for CPUs with AVX-512 F, BW, DQ and VL (Skylake-X, Zen 4 and later). See level_avx2.cpp for the order of the includes.
#include <memory>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own headers pass undefined registers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

using namespace sagc;

// clang-format off
#include "vec_avx512.h"
#include "kernels_all.inl"
// clang-format on

const KernelTable sagc::kAvx512Kernels = SAGC_KERNEL_TABLE("avx512");

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
