// Attention over a paged KV cache, for prefill chunks and decode rows alike.
//
// A query row (one head of one token) walks its KV positions in chunks of 64 absolute positions with an online softmax
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): scores, maximum, exponentials, weighted sum
// of the values in ascending position. Nothing in that arithmetic depends on other rows, on the block size or on where a
// prefill was cut.
//
// The rows of an item walk side by side. Positions whose blocks all of them hold are worked for all rows at once, so that K
// and V are fetched once for a prompt's siblings (as in Juravsky et al. 2024, Hydragen, arXiv:2402.05099, but within one
// softmax, so that nothing has to be merged); the other positions sequence by sequence. Within a chunk come first the keys
// of all segments, then the values of all, each run of positions for all KV heads before the next run, as they lie in memory.
// Decode is bound by that stream; it is fetched into the L2 cache some way ahead of the work (attention_stream.inl).
#pragma once

#include "attention_stream.inl"

namespace {

// Rows per tile: as many accumulators as leave registers for the operands, of 16 (baseline, AVX2) or 32.
constexpr bool kManyRegisters = Vec::kWidth == 16;
constexpr int kScoreRows = kManyRegisters ? 6 : 3;
constexpr int weigh_rows(int vecs) { return kManyRegisters ? (vecs == 4 ? 6 : 8) : 3; }

template <class T>
void load_rows(const AttentionArgs& a, const AttentionItem& item, AttentionState& s) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  s.rows = 0, s.heads = item.kv_end - item.kv_begin, s.width = attention_width(a.head_dim);
  for (int32_t t = item.begin; t < item.end; t++)
    for (int32_t g = item.head_begin; g < item.head_end; g++, s.rows++)
      s.token[s.rows] = a.tokens[t].token, s.query_head[s.rows] = g, s.visible[s.rows] = a.tokens[t].visible;
  const Vec scale = Vec::splat(a.scale);
  for (int h = 0; h < s.heads; h++)
    for (int r = 0; r < s.rows; r++) {
      const int at = s.place(h, r);
      const T* q = static_cast<const T*>(a.q) + s.token[r] * a.q_stride +
                   ((item.kv_begin + h) * group + s.query_head[r]) * a.head_dim;
      float *scaled = s.q + at * s.width, *o = s.o + at * s.width;
      for (int64_t i = 0; i < s.width; i += Vec::kWidth) {
        const int64_t n = a.head_dim - i;
        const Vec x = n >= Vec::kWidth ? Vec::load(q + i) : n > 0 ? Vec::load_partial(q + i, static_cast<int>(n)) : Vec::zero();
        (x * scale).store(scaled + i);
        Vec::zero().store(o + i);
      }
      s.max[at] = -__builtin_inff(), s.sum[at] = 0.0f;
    }
}

template <class T>
void store_rows(const AttentionArgs& a, const AttentionItem& item, const AttentionState& s) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  for (int h = 0; h < s.heads; h++)
    for (int r = 0; r < s.rows; r++) {
      const int at = s.place(h, r);
      const int64_t head = (item.kv_begin + h) * group + s.query_head[r];
      T* out = static_cast<T*>(a.out) + (s.token[r] * a.num_heads + head) * a.head_dim;
      const Vec sum = Vec::splat(s.visible[r] > 0 ? s.sum[at] : 1.0f);  // a row that sees nothing gives zeros
      for_each_vec(a.head_dim, [&](int64_t i, int n) { store_n(out + i, Vec::load(s.o + at * s.width + i) / sum, n); });
    }
}

// The positions of a run in one piece, for the KV head that begins at `head`; copied when the block size does not give them.
template <class C>
const C* locate(const AttentionArgs& a, AttentionState& s, const Segment& g, const C* head, int64_t start, int run, int count) {
  if (a.block_size % kAttentionRun == 0) return head + g.runs[run];
  C* copy = reinterpret_cast<C*>(s.copy);
  for (int j = 0; j < count; j++) {
    const int64_t p = start + g.first + run * kAttentionRun + j;
    const C* x = head + (g.table[p / a.block_size] * a.num_kv_heads * a.block_size + p % a.block_size) * a.head_dim;
    for (int64_t i = 0; i < a.head_dim; i++) copy[j * a.head_dim + i] = x[i];
  }
  return copy;
}

// Scores of ROWS rows for `count` positions (rounded up to whole tiles: the run has that many) from k on.
template <int ROWS, int COLS, class C>
inline __attribute__((always_inline)) void score_tile(const float* q, int64_t width, const C* k, int count, int64_t head_dim,
                                                      float* out, Fetch& fetch) {
  for (int j = 0; j < count; j += COLS, k += COLS * head_dim) {
    Vec acc[ROWS][COLS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
      for (int c = 0; c < COLS; c++) acc[r][c] = Vec::zero();
    // Positions [first, last) over the head.
    auto accumulate = [&](int first, int last) __attribute__((always_inline)) {
      int64_t i = 0;
      fetch.advance((last - first) * head_dim * int64_t{sizeof(C)});
      for (; i + Vec::kWidth <= head_dim; i += Vec::kWidth) {
        Vec x[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) x[r] = Vec::load(q + r * width + i);
#pragma GCC unroll 16
        for (int c = first; c < last; c++) {
          const Vec y = Vec::load(k + c * head_dim + i);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++) acc[r][c] = Vec::fma(x[r], y, acc[r][c]);
        }
      }
      if (i < head_dim) {
        const int n = static_cast<int>(head_dim - i);
        Vec x[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) x[r] = Vec::load(q + r * width + i);
#pragma GCC unroll 16
        for (int c = first; c < last; c++) {
          const Vec y = Vec::load_partial(k + c * head_dim + i, n);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++) acc[r][c] = Vec::fma(x[r], y, acc[r][c]);
        }
      }
    };
    if constexpr (ROWS == 1) {  // waits for memory, which is faster the more lies next to each other
      constexpr int kStep = kSpreadsFetches ? 4 : COLS;
#pragma GCC unroll 16
      for (int c = 0; c < COLS; c += kStep) accumulate(c, c + kStep);
    } else {
      accumulate(0, COLS);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
      for (int c = 0; c < COLS; c += 4)
        Vec::sum4(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3], out + r * kAttentionChunk + j + c);
  }
}

// One row has nothing to share a key with: more positions at a time instead, for independent sums.
template <class C>
void score_rows(int rows, const float* q, int64_t width, const C* k, int count, int64_t head_dim, float* out, Fetch& fetch) {
  for (int tiles = (rows + kScoreRows - 1) / kScoreRows; tiles > 0; tiles--) {
    const int n = (rows + tiles - 1) / tiles;
    switch (n) {
      case 1: score_tile<1, 8>(q, width, k, count, head_dim, out, fetch); break;
      case 2: score_tile<2, 4>(q, width, k, count, head_dim, out, fetch); break;
      case 3: score_tile<3, 4>(q, width, k, count, head_dim, out, fetch); break;
      default:
        if constexpr (kManyRegisters) {
          if (n == 4) score_tile<4, 4>(q, width, k, count, head_dim, out, fetch);
          if (n == 5) score_tile<5, 4>(q, width, k, count, head_dim, out, fetch);
          if (n == 6) score_tile<6, 4>(q, width, k, count, head_dim, out, fetch);
        }
    }
    rows -= n, q += n * width, out += n * kAttentionChunk;
  }
}

// Scores -> exponentials, maxima, sums and factors of all rows that see something of the chunk.
void softmax_rows(AttentionState& s, int64_t start) {
  auto for_each_row = [&](auto f) {
    for (int h = 0; h < s.heads; h++)
      for (int r = 0; r < s.rows; r++)
        if (const int64_t sees = s.visible[r] - start; sees > 0)
          f(s.place(h, r), static_cast<int>(sees < kAttentionChunk ? sees : kAttentionChunk));
  };
  for_each_row([&](int at, int count) {
    float* scores = s.scores + at * kAttentionChunk;
    Vec top = Vec::splat(s.max[at]);
    int j = 0;
    for (; j + Vec::kWidth <= count; j += Vec::kWidth) top = Vec::max(top, Vec::load(scores + j));
    if (j < count) {
      const Vec last = Vec::keep_first(Vec::load(scores + j), count - j, -__builtin_inff());
      last.store(scores + j);
      top = Vec::max(top, last);
    }
    const float max = top.max();
    s.factor[at] = max == s.max[at] ? 0.0f : s.max[at] - max;
    s.max[at] = max;
  });
  for (int i = 0; i < s.heads * s.rows; i += Vec::kWidth) exp(Vec::load(s.factor + i)).store(s.factor + i);
  for_each_row([&](int at, int count) {
    float* scores = s.scores + at * kAttentionChunk;
    const Vec shift = Vec::splat(s.max[at]);
    Vec sum = Vec::zero();
    for (int j = 0; j < count; j += Vec::kWidth) {
      const Vec p = exp(Vec::load(scores + j) - shift);
      p.store(scores + j);
      sum = sum + p;
    }
    s.sum[at] = s.sum[at] * s.factor[at] + sum.sum();
  });
}

// o[r] = o[r] * factor[r] + sum over positions [begin, end) of p[r][j] * v[j], for VECS vectors of the head; the last of them
// has `partial` lanes when that is not 0.
template <int ROWS, int VECS, class C>
inline __attribute__((always_inline)) void weigh_tile(float* o, int64_t width, const float* p, const float* factor,
                                                      const C* v, int begin, int end, int64_t head_dim, int64_t at,
                                                      int partial, Fetch& fetch) {
  Vec acc[ROWS][VECS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i++) acc[r][i] = Vec::load(o + r * width + at + i * Vec::kWidth) * Vec::splat(factor[r]);
  v += begin * head_dim + at;
  for (int j = begin; j < end; j++, v += head_dim) {
    fetch.advance(VECS * Vec::kWidth * int64_t{sizeof(C)});
    Vec y[VECS];
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i++)
      y[i] = VECS == 1 && partial > 0 ? Vec::load_partial(v, partial) : Vec::load(v + i * Vec::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Vec weight = Vec::splat(p[r * kAttentionChunk + j]);
#pragma GCC unroll 16
      for (int i = 0; i < VECS; i++) acc[r][i] = Vec::fma(weight, y[i], acc[r][i]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i++) acc[r][i].store(o + r * width + at + i * Vec::kWidth);
}

template <int VECS, class C>
void weigh_vecs(int rows, float* o, int64_t width, const float* p, const float* factor, const C* v, int begin, int end,
                int64_t head_dim, int64_t at, int partial, Fetch& fetch) {
  constexpr int kMost = weigh_rows(VECS);
  for (int tiles = (rows + kMost - 1) / kMost; tiles > 0; tiles--) {
    const int n = (rows + tiles - 1) / tiles;
    switch (n) {
#define SAGC_WEIGH(N) \
  case N: if constexpr (N <= kMost) weigh_tile<N, VECS>(o, width, p, factor, v, begin, end, head_dim, at, partial, fetch); break;
      SAGC_WEIGH(1)
      SAGC_WEIGH(2)
      SAGC_WEIGH(3)
      SAGC_WEIGH(4)
      SAGC_WEIGH(5)
      SAGC_WEIGH(6)
      SAGC_WEIGH(7)
      SAGC_WEIGH(8)
#undef SAGC_WEIGH
    }
    rows -= n, o += n * width, p += n * kAttentionChunk, factor += n;
  }
}

template <class C>
void weigh_rows(int rows, float* o, int64_t width, const float* p, const float* factor, const C* v, int begin, int end,
                int64_t head_dim, Fetch& fetch) {
  int64_t at = 0;
  for (int64_t vecs = head_dim / Vec::kWidth; vecs > 0;) {
    const int n = vecs == 3 || vecs == 6 ? 3 : vecs >= 4 ? 4 : vecs >= 2 ? 2 : 1;
    switch (n) {
      case 1: weigh_vecs<1>(rows, o, width, p, factor, v, begin, end, head_dim, at, 0, fetch); break;
      case 2: weigh_vecs<2>(rows, o, width, p, factor, v, begin, end, head_dim, at, 0, fetch); break;
      case 3: weigh_vecs<3>(rows, o, width, p, factor, v, begin, end, head_dim, at, 0, fetch); break;
      case 4: weigh_vecs<4>(rows, o, width, p, factor, v, begin, end, head_dim, at, 0, fetch); break;
    }
    vecs -= n, at += n * Vec::kWidth;
  }
  if (at < head_dim)
    weigh_vecs<1>(rows, o, width, p, factor, v, begin, end, head_dim, at, static_cast<int>(head_dim - at), fetch);
}

// The weighted sum of the values of a segment's run, together as far as all its rows see, then each row's remainder.
template <class C>
void weigh_run(AttentionState& s, const Segment& g, int h, int64_t start, const C* v, int run, int count, int64_t head_dim,
               Fetch& fetch) {
  static constexpr float kOnes[kAttentionRows] = {
      1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
      1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const int at = s.place(h, g.row_begin), rows = g.row_end - g.row_begin, first = g.first + run * kAttentionRun;
  float* o = s.o + at * s.width;
  const float* p = s.scores + at * kAttentionChunk + first;
  const float* factor = first == 0 ? s.factor + at : kOnes;  // the positions before have taken it in
  auto sees = [&](int r) {
    const int64_t n = s.visible[g.row_begin + r] - start - first;
    return static_cast<int>(n < 0 ? 0 : n < count ? n : count);
  };
  const int least = sees(0);  // rows of a sequence stand in ascending order, and rows that share see all there is
  if (least > 0) weigh_rows(rows, o, s.width, p, factor, v, 0, least, head_dim, fetch);
  for (int r = 0; r < rows; r++)
    if (const int n = sees(r); n > least)
      weigh_rows(1, o + r * s.width, s.width, p + r * kAttentionChunk, kOnes, v, least, n, head_dim, fetch);
}

template <class C>
void attend_chunk(const AttentionArgs& a, AttentionState& s, int64_t start, const ChunkSegments& chunk, Stream<C>& stream) {
  auto for_each_run = [&](bool values, auto f) {
    for (int i = 0; i < chunk.size; i++) {
      const Segment& g = chunk.list[i];
      for (int run = 0; run * kAttentionRun < g.count; run++) {
        const int left = g.count - run * kAttentionRun, count = left < kAttentionRun ? left : kAttentionRun;
        for (int h = 0; h < s.heads; h++) {
          Fetch fetch = stream.before_work(count);
          f(g, h, run, count, locate(a, s, g, stream.head(values, h), start, run, count), fetch);
          fetch.finish();
        }
      }
    }
  };
  for_each_run(false, [&](const Segment& g, int h, int run, int count, const C* k, Fetch& fetch) {
    const int at = s.place(h, g.row_begin);
    score_rows(g.row_end - g.row_begin, s.q + at * s.width, s.width, k, count, a.head_dim,
               s.scores + at * kAttentionChunk + g.first + run * kAttentionRun, fetch);
  });
  softmax_rows(s, start);
  for_each_run(true, [&](const Segment& g, int h, int run, int count, const C* v, Fetch& fetch) {
    weigh_run(s, g, h, start, v, run, count, a.head_dim, fetch);
  });
}

struct AttentionScratch {
  AttentionState state;
  ChunkSegments segments[2];
};

// Of the calling thread. On the heap, from the first use on: thread-local storage itself is zeroed and kept for every thread and
// for the kernels of all instruction sets (8.7 MB a thread before).
AttentionScratch& attention_scratch() {
  static thread_local std::unique_ptr<AttentionScratch> scratch;
  if (scratch == nullptr) scratch.reset(new AttentionScratch());
  return *scratch;
}

template <class T, class C>
void attention_range(const AttentionArgs& a, int64_t begin, int64_t end) {
  AttentionScratch& scratch = attention_scratch();
  AttentionState& s = scratch.state;
  ChunkSegments* segments = scratch.segments;
  for (int64_t i = begin; i < end; i++) {
    const AttentionItem& item = a.items[i];
    load_rows<T>(a, item, s);
    find_segments(a, item, s, 0, segments[0]);
    Stream<C> stream(a, item, segments[0]);
    for (int64_t chunk = 0; segments[chunk % 2].size > 0; chunk++) {
      const ChunkSegments &now = segments[chunk % 2], &next = segments[(chunk + 1) % 2];
      find_segments(a, item, s, chunk + 1, segments[(chunk + 1) % 2]);
      stream.turn_to(now, next);
      attend_chunk<C>(a, s, chunk * kAttentionChunk, now, stream);
    }
    store_rows<T>(a, item, s);
  }
}

template <class T>
void attention_from(const AttentionArgs& a, int64_t begin, int64_t end) {
  switch (a.cache_dtype) {
    case Dtype::kFloat32: return attention_range<T, float>(a, begin, end);
    case Dtype::kBFloat16: return attention_range<T, bf16_t>(a, begin, end);
    case Dtype::kFloat16: return attention_range<T, fp16_t>(a, begin, end);
  }
}

void attention(const AttentionArgs& a, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? attention_from<float>(a, begin, end) : attention_from<bf16_t>(a, begin, end);
}

}  // namespace
