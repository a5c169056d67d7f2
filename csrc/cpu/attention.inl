// Attention over a paged KV cache, for prefill chunks and decode rows alike.
//
// A query row (one head of one token) walks its KV positions in chunks of 64 absolute positions with an online softmax
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): scores, maximum, exponentials, weighted sum
// of the values in ascending position. Nothing in that arithmetic depends on other rows, on the block size or on where a
// prefill was cut. Rows of one item walk together while they hold the same blocks (query heads of a KV head, tokens of a
// prefill chunk, siblings over their prompt), so that a chunk of K and V is fetched once for all of them.
#pragma once

namespace {

struct AttentionRow {
  int32_t token, head, sequence, visible;
  float max, sum, factor;         // of the online softmax; the factor shrinks the output so far when the maximum rises
  float scores[kAttentionChunk];  // of the current chunk: scores, then their exponentials
};

struct AttentionState {
  AttentionRow rows[kAttentionRows];
  int count;
  int64_t width;  // head_dim rounded up to whole vectors
  alignas(64) float q[kAttentionRows * kAttentionMaxHeadDim];  // scaled by the softmax scale, zero behind head_dim
  alignas(64) float o[kAttentionRows * kAttentionMaxHeadDim];  // not yet divided by the sum
};

template <class T>
void load_rows(const AttentionArgs& a, const AttentionItem& item, int64_t kv_head, AttentionState& s) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  const Vec scale = Vec::splat(a.scale);
  s.count = 0;
  s.width = (a.head_dim + Vec::kWidth - 1) / Vec::kWidth * Vec::kWidth;
  for (int32_t t = item.begin; t < item.end; t++)
    for (int32_t g = item.head_begin; g < item.head_end; g++) {
      const AttentionToken& token = a.tokens[t];
      const int32_t head = static_cast<int32_t>(kv_head * group + g);
      AttentionRow& row = s.rows[s.count];
      row.token = token.token, row.head = head, row.sequence = token.sequence, row.visible = token.visible;
      row.max = -__builtin_inff(), row.sum = 0.0f;
      const T* q = static_cast<const T*>(a.q) + token.token * a.q_stride + head * a.head_dim;
      float* scaled = s.q + s.count * s.width;
      float* o = s.o + s.count * s.width;
      for_each_vec(a.head_dim, [&](int64_t i, int n) { (load_n(q + i, n) * scale).store(scaled + i); });
      for (int64_t i = 0; i < s.width; i++) o[i] = 0.0f;
      s.count++;
    }
}

template <class T>
void store_rows(const AttentionArgs& a, const AttentionState& s) {
  for (int r = 0; r < s.count; r++) {
    const AttentionRow& row = s.rows[r];
    T* out = static_cast<T*>(a.out) + (row.token * a.num_heads + row.head) * a.head_dim;
    const Vec sum = Vec::splat(row.visible > 0 ? row.sum : 1.0f);  // a row that sees nothing gives zeros
    for_each_vec(a.head_dim, [&](int64_t i, int n) { store_n(out + i, Vec::load(s.o + r * s.width + i) / sum, n); });
  }
}

// Addresses of the K and V rows of positions [first, first + count), padded to a multiple of 8 with the last one.
template <class C>
void chunk_pointers(const AttentionArgs& a, int32_t sequence, int64_t kv_head, int64_t first, int count, const C** k,
                    const C** v) {
  const int32_t* table = a.block_tables + sequence * a.block_tables_stride;
  int64_t block = first / a.block_size, offset = first % a.block_size;
  for (int j = 0; j < count; offset = 0, block++) {
    const int64_t start = ((table[block] * a.num_kv_heads + kv_head) * a.block_size + offset) * a.head_dim;
    const C* kp = static_cast<const C*>(a.k_cache) + start;
    const C* vp = static_cast<const C*>(a.v_cache) + start;
    for (int64_t i = offset; i < a.block_size && j < count; i++, j++) k[j] = kp, v[j] = vp, kp += a.head_dim, vp += a.head_dim;
  }
  for (int j = count; j % 8 != 0; j++) k[j] = k[count - 1], v[j] = v[count - 1];
}

// Fetches the K and V rows of the chunk that comes next, for the positions that are worked on in this one.
template <class C>
struct NextChunk {
  const C *const *k = nullptr, *const *v = nullptr;
  int count = 0;
  int64_t bytes = 0;

  void fetch(int begin, int end) const {
    for (int j = begin; j < end && j < count; j++)
      for (int64_t at = 0; at < bytes; at += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(k[j]) + at, 0, 2);
        __builtin_prefetch(reinterpret_cast<const char*>(v[j]) + at, 0, 2);
      }
  }
};

// Scores of `count` positions for ROWS rows; those a row does not see are computed too and dropped by softmax_row.
template <int ROWS, int COLS, class C>
inline __attribute__((always_inline)) void score_rows(AttentionState& s, const int* rows, const C* const* k, int count,
                                                      int64_t head_dim, const NextChunk<C>& next) {
  const float* q[ROWS];
  float* out[ROWS];
  for (int r = 0; r < ROWS; r++) q[r] = s.q + rows[r] * s.width, out[r] = s.rows[rows[r]].scores;
  for (int j = 0; j < count; j += COLS) {
    next.fetch(j, j + COLS);
    dot_tile<ROWS, COLS, false>(q, k + j, head_dim, out);
    for (int r = 0; r < ROWS; r++) out[r] += COLS;
  }
  next.fetch(count, kAttentionChunk);
}

// Scores -> exponentials; returns the factor by which the output so far has to shrink.
inline __attribute__((always_inline)) float softmax_row(AttentionRow& row, int count) {
  Vec top = Vec::splat(row.max);
  int j = 0;
  for (; j + Vec::kWidth <= count; j += Vec::kWidth) top = Vec::max(top, Vec::load(row.scores + j));
  if (j < count) {
    Vec last = Vec::keep_first(Vec::load(row.scores + j), count - j, -__builtin_inff());
    last.store(row.scores + j);
    top = Vec::max(top, last);
  }
  const float max = top.max();
  const Vec shift = Vec::splat(max);
  Vec sum = Vec::zero();
  for (j = 0; j < count; j += Vec::kWidth) {
    Vec p = exp(Vec::load(row.scores + j) - shift);
    p.store(row.scores + j);
    sum = sum + p;
  }
  float factor = 1.0f;  // what exp(0) gives, to the bit
  if (!(max == row.max)) {
    float lanes[Vec::kWidth];
    exp(Vec::splat(row.max - max)).store(lanes);
    factor = lanes[0];
  }
  row.max = max;
  row.sum = row.sum * factor + sum.sum();
  return factor;
}

// o[r] = o[r] * factor[r] + sum over positions [begin, end) of p[r][j] * v[j], for VECS vectors of the head from `at` on.
template <int ROWS, int VECS, class C>
inline __attribute__((always_inline)) void weigh_tile(float* const* o, const float* const* p, const float* factor,
                                                      const C* const* v, int begin, int end, int64_t at) {
  Vec acc[ROWS][VECS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i++) acc[r][i] = Vec::load(o[r] + at + i * Vec::kWidth) * Vec::splat(factor[r]);
  for (int j = begin; j < end; j++) {
    Vec weight[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) weight[r] = Vec::splat(p[r][j]);
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i++) {
      Vec x = Vec::load(v[j] + at + i * Vec::kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) acc[r][i] = Vec::fma(weight[r], x, acc[r][i]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i++) acc[r][i].store(o[r] + at + i * Vec::kWidth);
}

template <int ROWS, class C>
inline __attribute__((always_inline)) void weigh_rows(float* const* o, const float* const* p, const float* factor, const C* const* v, int begin, int end,
                int64_t head_dim) {
  constexpr int kMost = ROWS == 1 ? 8 : ROWS == 2 ? 6 : 4;  // vectors at a time: as many accumulators as registers allow
  int64_t at = 0;
  const int64_t whole = head_dim / Vec::kWidth * Vec::kWidth;
  for (; at + kMost * Vec::kWidth <= whole; at += kMost * Vec::kWidth)
    weigh_tile<ROWS, kMost>(o, p, factor, v, begin, end, at);
  for (; at + 2 * Vec::kWidth <= whole; at += 2 * Vec::kWidth) weigh_tile<ROWS, 2>(o, p, factor, v, begin, end, at);
  for (; at < whole; at += Vec::kWidth) weigh_tile<ROWS, 1>(o, p, factor, v, begin, end, at);
  if (at < head_dim)
    for (int r = 0; r < ROWS; r++) {
      Vec acc = Vec::load(o[r] + at) * Vec::splat(factor[r]);
      for (int j = begin; j < end; j++)
        acc = Vec::fma(Vec::splat(p[r][j]), Vec::load_partial(v[j] + at, static_cast<int>(head_dim - at)), acc);
      acc.store(o[r] + at);
    }
}

// The rows that see something of a chunk, and how many of its positions each of them sees.
struct ActiveRows {
  int rows[kAttentionRows], counts[kAttentionRows], size = 0;
};

// First half of a chunk's work for ROWS active rows from `at` on: scores and exponentials.
template <int ROWS, class C>
void score_step(AttentionState& s, const ActiveRows& active, int at, const C* const* k, int64_t head_dim,
                const NextChunk<C>& next) {
  const int *rows = active.rows + at, *counts = active.counts + at;
  int most = counts[0];
  for (int r = 1; r < ROWS; r++) most = most > counts[r] ? most : counts[r];
  score_rows<ROWS, ROWS == 1 ? 8 : 4>(s, rows, k, most, head_dim, next);
  for (int r = 0; r < ROWS; r++) s.rows[rows[r]].factor = softmax_row(s.rows[rows[r]], counts[r]);
}

// Second half: the weighted sum of the values, together as far as all ROWS rows see, then each row's remainder.
template <int ROWS, class C>
void weigh_step(AttentionState& s, const ActiveRows& active, int at, const C* const* v, int64_t head_dim) {
  const int *rows = active.rows + at, *counts = active.counts + at;
  float factor[ROWS], *o[ROWS];
  const float* p[ROWS];
  int least = counts[0];
  for (int r = 0; r < ROWS; r++) {
    factor[r] = s.rows[rows[r]].factor;
    o[r] = s.o + rows[r] * s.width;
    p[r] = s.rows[rows[r]].scores;
    least = least < counts[r] ? least : counts[r];
  }
  weigh_rows<ROWS>(o, p, factor, v, 0, least, head_dim);
  const float one = 1.0f;
  for (int r = 0; r < ROWS; r++)
    if (counts[r] > least) weigh_rows<1>(o + r, p + r, &one, v, least, counts[r], head_dim);
}

// A chunk for all its rows: all scores before all values, so that K and V pass through the L1 cache one after the other.
template <class C>
void attend_chunk(AttentionState& s, const ActiveRows& active, const C* const* k, const C* const* v, int64_t head_dim,
                  const NextChunk<C>& next) {
  const NextChunk<C> none;
  int r = 0;
  for (; r + 3 <= active.size; r += 3) score_step<3>(s, active, r, k, head_dim, r == 0 ? next : none);
  if (active.size - r == 2) score_step<2>(s, active, r, k, head_dim, r == 0 ? next : none);
  if (active.size - r == 1) score_step<1>(s, active, r, k, head_dim, r == 0 ? next : none);
  for (r = 0; r + 3 <= active.size; r += 3) weigh_step<3>(s, active, r, v, head_dim);
  if (active.size - r == 2) weigh_step<2>(s, active, r, v, head_dim);
  if (active.size - r == 1) weigh_step<1>(s, active, r, v, head_dim);
}

// A chunk of some sequence and KV head, as far as `visible` reaches: where a walk begins.
struct ChunkPlace {
  int32_t sequence;
  int64_t kv_head, chunk, visible;

  int count() const {
    const int64_t left = visible - chunk * kAttentionChunk;
    return static_cast<int>(left < 0 ? 0 : left < kAttentionChunk ? left : kAttentionChunk);
  }
};

// Rows [begin, end), which hold the same blocks here, over chunks [first_chunk, end_chunk) as far as each one sees.
// `after` is where the walk after this one begins.
template <class C>
void walk_chunks(const AttentionArgs& a, AttentionState& s, int64_t kv_head, int begin, int end, int64_t first_chunk,
                 int64_t end_chunk, const ChunkPlace& after) {
  const C *k[2][kAttentionChunk], *v[2][kAttentionChunk];
  int64_t visible = 0;
  for (int r = begin; r < end; r++) visible = visible > s.rows[r].visible ? visible : s.rows[r].visible;
  visible = visible < end_chunk * kAttentionChunk ? visible : end_chunk * kAttentionChunk;
  auto locate = [&](const ChunkPlace& place, int64_t page) {
    const int count = place.count();
    if (count > 0)
      chunk_pointers(a, place.sequence, place.kv_head, place.chunk * kAttentionChunk, count, k[page], v[page]);
    return count;
  };
  ChunkPlace here{s.rows[begin].sequence, kv_head, first_chunk, visible};
  for (int64_t page = 0, count = locate(here, page); count > 0; page = 1 - page) {
    const int64_t start = here.chunk * kAttentionChunk;
    here.chunk++;
    const int next_count = locate(here.count() > 0 ? here : after, 1 - page);
    const NextChunk<C> next{k[1 - page], v[1 - page], next_count, a.head_dim * int64_t{sizeof(C)}};
    ActiveRows active;
    for (int r = begin; r < end; r++) {
      const int64_t left = s.rows[r].visible - start;
      if (left <= 0) continue;
      active.rows[active.size] = r;
      active.counts[active.size++] = static_cast<int>(left < kAttentionChunk ? left : kAttentionChunk);
    }
    attend_chunk(s, active, k[page], v[page], a.head_dim, next);
    count = here.count();
  }
}

template <class T, class C>
void attention_range(const AttentionArgs& a, int64_t begin, int64_t end) {
  static thread_local AttentionState s;
  for (int64_t i = begin; i < end; i++) {
    const AttentionItem& item = a.items[i / a.num_kv_heads];
    const int64_t kv_head = i % a.num_kv_heads, shared = item.shared_chunks;
    ChunkPlace after_item{0, 0, 0, 0};
    if (i + 1 < end) {
      const AttentionToken& first = a.tokens[a.items[(i + 1) / a.num_kv_heads].begin];
      after_item = {first.sequence, (i + 1) % a.num_kv_heads, 0, first.visible};
    }
    load_rows<T>(a, item, kv_head, s);
    if (shared > 0) {
      const ChunkPlace own{s.rows[0].sequence, kv_head, shared, s.rows[0].visible};
      walk_chunks<C>(a, s, kv_head, 0, s.count, 0, shared, own);
    }
    for (int r = 0, next; r < s.count; r = next) {
      for (next = r + 1; next < s.count && s.rows[next].sequence == s.rows[r].sequence;) next++;
      const ChunkPlace sibling{s.rows[next % s.count].sequence, kv_head, shared, s.rows[next % s.count].visible};
      walk_chunks<C>(a, s, kv_head, r, next, shared, INT64_MAX / kAttentionChunk, next < s.count ? sibling : after_item);
    }
    store_rows<T>(a, s);
  }
}

void attention(const AttentionArgs& a, int64_t begin, int64_t end) {
  const bool q32 = a.dtype == Dtype::kFloat32, kv32 = a.cache_dtype == Dtype::kFloat32;
  if (q32)
    kv32 ? attention_range<float, float>(a, begin, end) : attention_range<float, bf16_t>(a, begin, end);
  else
    kv32 ? attention_range<bf16_t, float>(a, begin, end) : attention_range<bf16_t, bf16_t>(a, begin, end);
}

}  // namespace
