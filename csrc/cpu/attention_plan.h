// Which rows walk the KV cache together: the plan of one step's paged attention, from plain arrays.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace sagc {

// The arrays of a step, as sagc_fast.ops.layouts.PagedLayout describes them. Trusted here: op_attention.cpp checks them.
struct AttentionLayout {
  const int32_t* cu_query;       // [S + 1]
  const int32_t* context_lens;   // [S]
  const int32_t* block_tables;   // [S, blocks_per_sequence]
  const int32_t* share_group;    // [S], -1 for none
  const int32_t* shared_blocks;  // [S]
  int64_t num_sequences, blocks_per_sequence;
};

struct AttentionShape {
  int64_t num_heads, num_kv_heads, head_dim, block_size;
};

struct AttentionPlan {
  std::vector<AttentionToken> tokens;
  std::vector<AttentionItem> items;  // the kernel's work items, largest first
  double flops = 0.0;
};

// The plan depends on the layout and the shape alone, so one plan serves every layer of a step. `num_threads` decides only
// how finely the work is cut, never a result.
AttentionPlan plan_attention(const AttentionLayout& layout, const AttentionShape& shape, int num_threads);

}  // namespace sagc
