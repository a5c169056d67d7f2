// Work spread over threads: one small pool for all operators, made for operations of a few microseconds.
#pragma once

#include <cstdint>

namespace sagc {

// f(context, worker, begin, end) with disjoint ranges that cover [0, items), each of at least `grain` items where there are
// so many; worker is in [0, num_workers()) and no two ranges run at once under one number. Returns when all are done.
void parallel_for(int64_t items, int64_t grain, void (*f)(void* context, int worker, int64_t begin, int64_t end),
                  void* context);

// Threads that parallel_for may use, the caller's included: torch's intra-op number.
int num_workers();

constexpr double kMinFlopsPerRange = 2e5;  // a few microseconds: less is not worth handing over

// f(worker, begin, end) over [0, items), on several threads when every one of them gets enough to do.
template <class F>
void parallel_workers(int64_t items, double flops, const F& f) {
  if (items <= 0) return;
  int64_t grain = 1;
  if (flops > 0) grain = static_cast<int64_t>(kMinFlopsPerRange / (flops / static_cast<double>(items))) + 1;
  if (grain >= items) {
    f(0, int64_t{0}, items);
    return;
  }
  auto call = [](void* context, int worker, int64_t begin, int64_t end) {
    (*static_cast<const F*>(context))(worker, begin, end);
  };
  parallel_for(items, grain, call, const_cast<void*>(static_cast<const void*>(&f)));
}

// The same for work that needs no worker number: f(begin, end).
template <class F>
void parallel(int64_t items, double flops, const F& f) {
  parallel_workers(items, flops, [&](int, int64_t begin, int64_t end) { f(begin, end); });
}

}  // namespace sagc
