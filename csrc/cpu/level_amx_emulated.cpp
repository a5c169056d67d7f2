// level_amx.cpp on a model of the tiles, to test its kernels where there is no AMX. Never chosen unless asked for by name.
#include <memory>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own headers pass undefined registers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

using namespace sagc;

// clang-format off
#include "vec_avx512.h"
#include "vec_math.inl"
#include "amx_emulated.h"
#include "linear_amx.inl"
// clang-format on

const KernelTable& sagc::amx_emulated_kernels() {
  // As level_amx.cpp where this CPU can.
  static const KernelTable table =
      table_with_amx("amx_emulated", __builtin_cpu_supports("avx512bf16") ? kAvx512Bf16Kernels : kAvx512Kernels);
  return table;
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
