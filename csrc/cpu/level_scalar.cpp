// Kernels for any CPU: baseline instructions only.
#include <memory>
#include <type_traits>

#include "kernels.h"

using namespace sagc;

// clang-format off
#include "vec_scalar.h"
#include "kernels_all.inl"
// clang-format on

const KernelTable sagc::kScalarKernels = SAGC_KERNEL_TABLE("scalar");
