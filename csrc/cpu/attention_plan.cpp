#include "attention_plan.h"

#include <algorithm>
#include <numeric>

namespace sagc {
namespace {

constexpr int kItemsPerThread = 4;  // of unlike size: enough for threads that take them one by one to end together

// Sequences that hold the same blocks in their first `shared` positions, one after the other in AttentionPlan::tokens.
struct Bundle {
  int32_t begin, end;  // tokens
  int32_t shared;
};

// Sequences of one group next to each other; -1 is no group.
std::vector<int32_t> sequences_by_group(const AttentionLayout& l, const std::vector<int32_t>& group) {
  std::vector<int32_t> order(static_cast<size_t>(l.num_sequences));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return group[a] < group[b]; });
  return order;
}

std::vector<Bundle> bundle(const AttentionLayout& l, int64_t block_size, std::vector<AttentionToken>& tokens) {
  std::vector<int32_t> group(static_cast<size_t>(l.num_sequences));
  for (int64_t s = 0; s < l.num_sequences; s++) group[s] = l.shared_blocks[s] > 0 ? l.share_group[s] : -1;
  const std::vector<int32_t> order = sequences_by_group(l, group);
  std::vector<Bundle> bundles;
  tokens.reserve(static_cast<size_t>(l.cu_query[l.num_sequences]));
  for (size_t i = 0, next; i < order.size(); i = next) {
    Bundle b{static_cast<int32_t>(tokens.size()), 0, INT32_MAX};
    for (next = i; next < order.size() && (next == i || (group[order[i]] >= 0 && group[order[next]] == group[order[i]])); next++) {
      const int32_t s = order[next], queries = l.cu_query[s + 1] - l.cu_query[s];
      for (int32_t q = 0; q < queries; q++) tokens.push_back({l.cu_query[s] + q, s, l.context_lens[s] - queries + q + 1});
      // Every row has to see all of the shared positions.
      if (queries > 0)
        b.shared = static_cast<int32_t>(std::min<int64_t>({b.shared, l.shared_blocks[s] * block_size, l.context_lens[s] - queries + 1}));
    }
    b.end = static_cast<int32_t>(tokens.size());
    if (next - i == 1) b.shared = 0;
    b.shared = b.shared / kAttentionRun * kAttentionRun;
    if (b.end > b.begin) bundles.push_back(b);
  }
  return bundles;
}

int32_t divide_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

}  // namespace

AttentionPlan plan_attention(const AttentionLayout& layout, const AttentionShape& shape, int num_threads) {
  AttentionPlan plan;
  const std::vector<Bundle> bundles = bundle(layout, shape.block_size, plan.tokens);
  const int32_t group = static_cast<int32_t>(shape.num_heads / shape.num_kv_heads);
  const int32_t num_kv_heads = static_cast<int32_t>(shape.num_kv_heads);
  const int32_t heads = std::min(group, int32_t{kAttentionRows}), most_tokens = std::max(1, kAttentionRows / heads);
  int32_t pieces = 0;
  for (const Bundle& b : bundles) pieces += divide_up(b.end - b.begin, most_tokens) * divide_up(group, heads);
  // All KV heads of a block lie side by side in memory: one item takes them all when there are items enough without.
  const int32_t wanted = num_threads > 1 ? kItemsPerThread * num_threads : 1;
  const int32_t splits = std::min(num_kv_heads, divide_up(wanted, std::max(1, pieces)));
  const int32_t width = static_cast<int32_t>(attention_width(shape.head_dim));
  for (const Bundle& b : bundles) {
    const int32_t count = b.end - b.begin, parts = divide_up(count, most_tokens);
    for (int32_t p = 0; p < parts; p++) {
      const int32_t begin = b.begin + static_cast<int32_t>(int64_t{count} * p / parts);
      const int32_t end = b.begin + static_cast<int32_t>(int64_t{count} * (p + 1) / parts);
      for (int32_t g = 0; g < group; g += heads) {
        const int32_t rows = (end - begin) * (std::min(g + heads, group) - g);
        const int32_t fit = std::max(1, std::min(kAttentionRowHeads, kAttentionFloats / width) / rows);
        const int32_t ranges = std::max(splits, divide_up(num_kv_heads, fit));
        for (int32_t r = 0; r < ranges; r++)
          plan.items.push_back({begin, end, g, std::min(g + heads, group), num_kv_heads * r / ranges,
                                num_kv_heads * (r + 1) / ranges, b.shared});
      }
    }
  }
  for (const AttentionToken& token : plan.tokens)
    plan.flops += 4.0 * static_cast<double>(token.visible) * static_cast<double>(shape.num_heads * shape.head_dim);
  if (num_threads > 1) {
    auto work = [&](const AttentionItem& item) {  // positions x KV heads, those that are read once only counted once
      int64_t positions = item.shared;
      for (int32_t t = item.begin; t < item.end; t++) positions += plan.tokens[t].visible - item.shared;
      return positions * (item.kv_end - item.kv_begin);
    };
    std::stable_sort(plan.items.begin(), plan.items.end(),
                     [&](const AttentionItem& a, const AttentionItem& b) { return work(a) > work(b); });
  }
  return plan;
}

}  // namespace sagc
