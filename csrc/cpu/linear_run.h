// A product from its arguments to its result: the kernel's three steps on the thread pool.
#pragma once

#include "kernels.h"
#include "threads.h"

namespace sagc {

// Fewer rows take as long as so many: as long as the weights take to arrive.
constexpr int64_t kRowsPerWeightRead = 8;

// args.scratch points to linear_scratch bytes, or to more, or to nothing when it is 0.
inline void run_linear(const LinearArgs& args) {
  const KernelTable& table = kernels();
  if (table.linear_scratch(args) > 0)
    parallel(args.M, static_cast<double>(args.M * args.K), [&](int64_t b, int64_t e) { table.linear_pack(args, b, e); });
  const int64_t rows = args.M > 0 && args.M < kRowsPerWeightRead ? kRowsPerWeightRead : args.M;
  parallel(table.linear_items(args), 2.0 * static_cast<double>(rows * args.N) * static_cast<double>(args.K),
           [&](int64_t b, int64_t e) { table.linear(args, b, e); });
}

}  // namespace sagc
