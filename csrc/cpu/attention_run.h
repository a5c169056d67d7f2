// Attention over a plan's items on the thread pool.
#pragma once

#include <algorithm>
#include <atomic>

#include "attention_plan.h"
#include "threads.h"

namespace sagc {

// Everything in args but tokens and items is set. Items differ in size, so threads take the next one when they are free.
inline void run_attention(AttentionArgs args, const AttentionPlan& plan) {
  args.tokens = plan.tokens.data(), args.items = plan.items.data();
  const KernelTable& table = kernels();
  const int64_t items = static_cast<int64_t>(plan.items.size());
  const int64_t threads = std::min({items, int64_t{num_workers()},
                                    static_cast<int64_t>(plan.flops / kMinFlopsPerRange) + 1});
  if (threads <= 1) return table.attention(args, 0, items);
  std::atomic<int64_t> next{0};
  parallel(threads, 0.0, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) table.attention(args, i, i + 1);
  });
}

}  // namespace sagc
