// What an item's rows read of the KV cache, chunk by chunk, and the fetching of it ahead of the work.
#pragma once

namespace {

constexpr int kRunsPerChunk = kAttentionChunk / kAttentionRun;
constexpr int64_t kLeastAheadBytes = 12 * 1024;  // measured: 12 to 24 KB do alike, 48 KB cost 10%
constexpr int64_t kMostAheadBytes = 24 * 1024;
// Line by line beside the work, or a run at a time before it? Measured on Zen 3 (AVX2) and Zen 4 (AVX-512): docs/native.md.
constexpr bool kSpreadsFetches = Vec::kWidth < 16;

// Row r of the item's KV head h stands at place h * rows + r.
struct AttentionState {
  int rows, heads;
  int64_t width;  // of a row of q and o
  int32_t token[kAttentionRows], query_head[kAttentionRows], visible[kAttentionRows];  // query head within the KV head
  alignas(64) float max[kAttentionRowHeads], sum[kAttentionRowHeads];
  alignas(64) float factor[kAttentionRowHeads];  // shrinks the output so far when the maximum rises
  alignas(64) float q[kAttentionFloats];         // scaled by the softmax scale, zero behind head_dim
  alignas(64) float o[kAttentionFloats];         // not yet divided by the sum
  alignas(64) float scores[kAttentionRowHeads * kAttentionChunk];  // of the chunk: scores, then their exponentials
  alignas(64) float copy[kAttentionRun * kAttentionMaxHeadDim];  // of positions that the cache scatters

  int place(int head, int row) const { return head * rows + row; }
};

// Rows [row_begin, row_end) over the positions [first, first + count) of a chunk, whose blocks they all hold.
struct Segment {
  int row_begin, row_end, first, count;
  const int32_t* table;
  int64_t runs[kRunsPerChunk];  // where kAttentionRun positions each begin in the cache, in elements, for KV head 0
};

struct ChunkSegments {
  Segment list[kAttentionRows + 1];
  int size = 0;
  int64_t positions = 0;
};

// The segments of a chunk: first what all rows share, then each sequence's own positions.
void find_segments(const AttentionArgs& a, const AttentionItem& item, const AttentionState& s, int64_t chunk, ChunkSegments& out) {
  const int64_t start = chunk * kAttentionChunk, left = item.shared - start;
  const int joint = static_cast<int>(left < 0 ? 0 : left < kAttentionChunk ? left : kAttentionChunk);
  out.size = 0, out.positions = 0;
  auto add = [&](int row_begin, int row_end, int first, int64_t count, int32_t sequence) {
    Segment& g = out.list[out.size++];
    g.row_begin = row_begin, g.row_end = row_end, g.first = first;
    g.count = static_cast<int>(count < kAttentionChunk - first ? count : kAttentionChunk - first);
    g.table = a.block_tables + sequence * a.block_tables_stride;
    out.positions += g.count;
    for (int i = 0; i * kAttentionRun < g.count; i++) {
      const int64_t p = start + first + i * kAttentionRun, block = p / a.block_size, offset = p % a.block_size;
      g.runs[i] = (g.table[block] * a.num_kv_heads * a.block_size + offset) * a.head_dim;
    }
  };
  if (joint > 0) add(0, s.rows, 0, joint, a.tokens[item.begin].sequence);
  if (joint == kAttentionChunk) return;
  const int heads = item.head_end - item.head_begin;
  for (int32_t t = item.begin, end; t < item.end; t = end) {
    const int32_t sequence = a.tokens[t].sequence;
    for (end = t + 1; end < item.end && a.tokens[end].sequence == sequence;) end++;
    const int64_t sees = a.tokens[end - 1].visible - (start + joint);
    if (sees <= 0) continue;
    while (a.tokens[t].visible <= start + joint) t++;
    add((t - item.begin) * heads, (end - item.begin) * heads, joint, sees, sequence);
  }
}

// Lines that are still to be asked for while a piece of work goes on. A core has room for some twenty misses; a burst of more makes
// it stop until they are back, and nothing is worked meanwhile.
struct Fetch {
  const char *at = nullptr, *end = nullptr;

  // As much as `bytes` of work allow.
  inline __attribute__((always_inline)) void advance(int64_t bytes) {
    if (!kSpreadsFetches || at >= end) return;
    for (const char* stop = at + bytes; at < stop; at += 64) __builtin_prefetch(at, 0, 2);
  }
  inline __attribute__((always_inline)) void finish() {
    for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Asks for the keys and values in the order of the work (pass, segment, run, KV head), some way ahead of it, also into the
// next chunk. Each piece of work is announced; as much is then fetched as is worked, which keeps the distance.
template <class C>
class Stream {
 public:
  Stream(const AttentionArgs& a, const AttentionItem& item, const ChunkSegments& first)
      : a_(a), item_(item), now_(&first), next_(nullptr), list_(&first), heads_(item.kv_end - item.kv_begin) {}

  // The lists of the chunk that is worked now and of the next one.
  void turn_to(const ChunkSegments& now, const ChunkSegments& next) {
    now_ = &now, next_ = &next;
    if (list_ == nullptr) list_ = next_;
  }

  const C* head(bool values, int h) const {
    return static_cast<const C*>(values ? a_.v_cache : a_.k_cache) + (item_.kv_begin + h) * a_.block_size * a_.head_dim;
  }

  // What the work should fetch. Forced inline: GCC drops calls of a function that does nothing but prefetch.
  inline __attribute__((always_inline)) Fetch before_work(int64_t positions) {
    const int64_t bytes = positions * a_.head_dim * int64_t{sizeof(C)};
    Fetch fetch;
    ahead_ -= bytes;
    for (int64_t due = bytes; ahead_ < kMostAheadBytes && (due > 0 || ahead_ < kLeastAheadBytes);) {
      if (list_ == nullptr || list_->size == 0) break;
      fetch.finish();
      fetch = next_run();
      due -= fetch.end - fetch.at;
    }
    if (!kSpreadsFetches) fetch.finish();
    return fetch;
  }

 private:
  Fetch next_run() {
    const Segment& g = list_->list[segment_];
    const int left = g.count - run_ * kAttentionRun;
    const int64_t bytes = (left < kAttentionRun ? left : kAttentionRun) * a_.head_dim * int64_t{sizeof(C)};
    const char* p = reinterpret_cast<const char*>(head(values_, head_) + g.runs[run_]);
    ahead_ += bytes;
    if (++head_ == heads_) {
      head_ = 0;
      if (left <= kAttentionRun)
        next_segment();
      else
        run_++;
    }
    return {p, p + bytes};
  }

  void next_segment() {
    run_ = 0;
    if (++segment_ < list_->size) return;
    segment_ = 0, values_ = !values_;
    if (!values_) list_ = list_ == now_ ? next_ : nullptr;  // none: the chunk after the next is not known yet
  }

  const AttentionArgs& a_;
  const AttentionItem& item_;
  const ChunkSegments *now_, *next_;
  const ChunkSegments* list_;  // what to fetch next:
  bool values_ = false;
  int segment_ = 0, run_ = 0, head_ = 0;
  const int heads_;
  int64_t ahead_ = 0;  // bytes fetched and not yet worked
};

}  // namespace
