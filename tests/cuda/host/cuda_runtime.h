// Stands in for the CUDA headers, so that g++ compiles csrc/cuda/*.cu as they are and tests run the kernels without a GPU.
//
// Blocks run one after the other; the threads of a block are fibers, which give way only at __syncthreads and the warp
// collectives. A barrier that not every thread reaches stops the program with a message, as it would hang on a GPU. The
// order in which fibers run is the test's to choose (sagc_host_order): a kernel that misses a barrier gives other results
// when it is turned around. Shared memory is static and is filled with 0xff before every block.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

using cudaStream_t = void*;
inline int cudaGetLastError() { return 0; }

struct uint4 {
  uint32_t x, y, z, w;
};

using std::max;
using std::min;

namespace sagc_host {

constexpr int kWarp = 32;

struct Index {
  unsigned x = 0;
};

struct Barrier {
  int expected = 0, arrived = 0;
  int64_t generation = 0;
};

constexpr size_t kStackBytes = 64 * 1024;

struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool has_started = false, is_done = false;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Barrier> warps;
  Barrier all;
  std::vector<uint64_t> lanes;  // what the threads of each warp show each other, two generations of it
  jmp_buf scheduler;
  ucontext_t main;
  int current = 0;
  bool has_moved = false;
  std::function<void()> body;
};

inline Block* block = nullptr;
inline std::vector<void*> stacks;  // kept from block to block
inline Index thread_index, block_index;
inline bool is_reversed = false;

inline void yield() {
  Fiber& self = block->fibers[block->current];
  if (_setjmp(self.place) == 0) _longjmp(block->scheduler, 1);
}

inline void wait(Barrier& barrier) {
  const int64_t generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0, barrier.generation++, block->has_moved = true;
    return;
  }
  while (barrier.generation == generation) yield();
}

inline void entry() {
  block->body();
  block->fibers[block->current].is_done = true;
  block->has_moved = true;
  _longjmp(block->scheduler, 1);
}

// Run or resume one fiber until it waits or ends.
inline void resume(int index) {
  Fiber& fiber = block->fibers[index];
  block->current = index, thread_index.x = static_cast<unsigned>(index);
  if (_setjmp(block->scheduler) != 0) return;
  if (fiber.has_started) _longjmp(fiber.place, 1);
  fiber.has_started = block->has_moved = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stacks[index];
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
  swapcontext(&block->main, &fiber.context);
}

template <typename Body>
void launch(unsigned grid, unsigned threads, Body body) {
  while (stacks.size() < threads) stacks.push_back(malloc(kStackBytes));
  for (unsigned b = 0; b < grid; b++) {
    Block one;
    one.fibers = std::vector<Fiber>(threads);
    one.warps = std::vector<Barrier>((threads + kWarp - 1) / kWarp);
    for (size_t w = 0; w < one.warps.size(); w++) one.warps[w].expected = std::min<int>(kWarp, threads - w * kWarp);
    one.all.expected = static_cast<int>(threads);
    one.lanes = std::vector<uint64_t>(2 * threads);
    one.body = body;
    block = &one, block_index.x = b;
    for (bool is_running = true; is_running;) {
      is_running = one.has_moved = false;
      for (unsigned i = 0; i < threads; i++) {
        const unsigned index = is_reversed ? threads - 1 - i : i;
        if (!one.fibers[index].is_done) resume(static_cast<int>(index)), is_running = true;
      }
      if (is_running && !one.has_moved) {
        fprintf(stderr, "block %u hangs: some threads wait at a barrier that others never reach\n", b);
        abort();
      }
    }
    block = nullptr;
  }
}

// Every lane shows a value; returns where the values of the warp stand until the next collective but one.
template <typename T>
T* exchange(T value) {
  static_assert(sizeof(T) <= 8);
  const int thread = block->current, warp = thread / kWarp;
  Barrier& barrier = block->warps[warp];
  const size_t half = static_cast<size_t>(barrier.generation % 2) * block->fibers.size();
  T* shown = reinterpret_cast<T*>(&block->lanes[half + warp * kWarp]);
  shown[thread % kWarp] = value;
  wait(barrier);
  return shown;
}

}  // namespace sagc_host

#define threadIdx sagc_host::thread_index
#define blockIdx sagc_host::block_index
#define SAGC_LAUNCH(kernel, grid, block, stream, ...) sagc_host::launch(grid, block, [=] { kernel(__VA_ARGS__); })

inline void __syncthreads() { sagc_host::wait(sagc_host::block->all); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return sagc_host::exchange(value)[lane];
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = sagc_host::block->current % sagc_host::kWarp;
  return sagc_host::exchange(value)[lane ^ mask];
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const int lane = sagc_host::block->current % sagc_host::kWarp;
  return sagc_host::exchange(value)[lane >= delta ? lane - delta : lane];
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  const uint32_t* shown = sagc_host::exchange<uint32_t>(predicate);
  unsigned bits = 0;
  for (int lane = 0; lane < sagc_host::kWarp; lane++) bits |= shown[lane] << lane;
  return bits;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
inline float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<uint32_t>(bits)); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }

// 0: threads of a block in their order, 1: the last one first.
extern "C" void sagc_host_order(int is_reversed);
