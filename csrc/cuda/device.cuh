// What the kernels share: the launch, and reductions of a warp. Everything here also compiles for the host, where
// tests/cuda/host stands in for the CUDA headers (threads become fibers), so that the very same source is tested
// without a GPU.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "operations.h"

#ifdef __CUDACC__
#define SAGC_LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#endif

namespace sagc {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ float warp_max(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

__device__ __forceinline__ double warp_sum(double x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

// Sum of this lane's x and those of all lanes before it.
__device__ __forceinline__ double warp_cumulative(double x, int lane) {
  for (int step = 1; step < kWarp; step *= 2) {
    const double before = __shfl_up_sync(kAll, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

}  // namespace sagc
