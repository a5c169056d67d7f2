// Kernels for CPUs with AVX2 and FMA (Haswell, Zen and later). The pragma, not the command line, sets the target, and it
// stands behind the standard headers: no inline function of theirs may come out of here with instructions that the CPU that
// loads the library might lack. All that follows has internal linkage for the same reason.
#include <memory>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

using namespace sagc;

// clang-format off
#include "vec_avx2.h"
#define SAGC_LANES_OF_COLUMNS
#include "kernels_all.inl"
// clang-format on

const KernelTable sagc::kAvx2Kernels = SAGC_KERNEL_TABLE("avx2");

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
