// Attention over packed groups for training: a prompt is causal in itself, a completion token sees its group's whole prompt
// and its own completion up to itself. Nothing is padded or copied per completion.
//
// A work item is one KV head of a part (a group, or a share of a large one). Its prompt's keys and values are widened to fp32
// and transposed once; then blocks of query rows walk them in steps of kVarlenKeys, with an online softmax in forward and
// with the saved log-sum-exp in backward (Dao, "FlashAttention-2", arXiv:2307.08691). All five products have one form, rows of
// broadcast factors times rows of vectors, so there is one inner loop, and no sum over lanes. Tiles wholly in the future are
// skipped.
#pragma once

namespace {

constexpr int kOuterRows = 6;                              // with kOuterVecs vectors each: accumulators that fit the registers
constexpr int kOuterVecs = Vec::kWidth == 16 ? 3 : 2;

inline int64_t round_up(int64_t n) { return (n + Vec::kWidth - 1) / Vec::kWidth * Vec::kWidth; }

// c[r] (+)= sum over k of a[r * a_row + k * a_step] * b[k], for VECS vectors of the rows of b and c.
template <int ROWS, int VECS, bool ADD>
inline __attribute__((always_inline)) void outer_tile(const float* a, int64_t a_row, int64_t a_step, const float* b,
                                                      int64_t b_stride, int64_t depth, float* c, int64_t c_stride) {
  Vec acc[ROWS][VECS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i++) acc[r][i] = ADD ? Vec::load(c + r * c_stride + i * Vec::kWidth) : Vec::zero();
  for (int64_t k = 0; k < depth; k++) {
    Vec x[VECS];
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i++) x[i] = Vec::load(b + i * Vec::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Vec factor = Vec::splat(a[r * a_row]);
#pragma GCC unroll 16
      for (int i = 0; i < VECS; i++) acc[r][i] = Vec::fma(factor, x[i], acc[r][i]);
    }
    a += a_step, b += b_stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i++) acc[r][i].store(c + r * c_stride + i * Vec::kWidth);
}

template <int ROWS, bool ADD>
void outer_rows(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_stride, int64_t depth, float* c,
                int64_t c_stride, int64_t width) {
  int64_t i = 0;
  for (; i + kOuterVecs * Vec::kWidth <= width; i += kOuterVecs * Vec::kWidth)
    outer_tile<ROWS, kOuterVecs, ADD>(a, a_row, a_step, b + i, b_stride, depth, c + i, c_stride);
  if (kOuterVecs == 3 && i + 2 * Vec::kWidth == width)
    outer_tile<ROWS, 2, ADD>(a, a_row, a_step, b + i, b_stride, depth, c + i, c_stride);
  else if (i < width)
    outer_tile<ROWS, 1, ADD>(a, a_row, a_step, b + i, b_stride, depth, c + i, c_stride);
}

// At most kOuterRows rows; `width` is a multiple of the vector's.
template <bool ADD>
inline void outer(int rows, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_stride, int64_t depth,
                  float* c, int64_t c_stride, int64_t width) {
  switch (rows) {
    case 1: return outer_rows<1, ADD>(a, a_row, a_step, b, b_stride, depth, c, c_stride, width);
    case 2: return outer_rows<2, ADD>(a, a_row, a_step, b, b_stride, depth, c, c_stride, width);
    case 3: return outer_rows<3, ADD>(a, a_row, a_step, b, b_stride, depth, c, c_stride, width);
    case 4: return outer_rows<4, ADD>(a, a_row, a_step, b, b_stride, depth, c, c_stride, width);
    case 5: return outer_rows<5, ADD>(a, a_row, a_step, b, b_stride, depth, c, c_stride, width);
    default: return outer_rows<6, ADD>(a, a_row, a_step, b, b_stride, depth, c, c_stride, width);
  }
}

// Keys and values of a span for one KV head, fp32: rows [length, width] and columns [D, padded], zeros behind their ends.
struct VarlenKeys {
  Span span;
  int64_t padded;
  float *k, *v, *k_columns, *v_columns, *grad_k, *grad_v;  // the last three in backward only
};

struct VarlenBlock {
  float *q, *o, *grad_o;   // [kVarlenRows, width]; q is scaled, o is the gradient of q in backward
  float *scores, *grads;   // [kVarlenRows, kVarlenKeys]
  float max[kVarlenRows], sum[kVarlenRows], lse[kVarlenRows], delta[kVarlenRows];
};

// Hands out scratch in steps of 64 bytes; without memory it only counts.
struct Scratch {
  float* memory;
  int64_t used = 0;

  float* take(int64_t count) {
    float* p = memory == nullptr ? nullptr : memory + used;
    used += (count + 15) / 16 * 16;
    return p;
  }
};

VarlenKeys take_keys(Scratch& at, int64_t length, int64_t head_dim, bool backward) {
  const int64_t width = round_up(head_dim);
  VarlenKeys s{};
  s.k = at.take(length * width), s.v = at.take(length * width);
  s.k_columns = at.take(head_dim * round_up(length));
  if (backward) {
    s.v_columns = at.take(head_dim * round_up(length));
    s.grad_k = at.take(length * width), s.grad_v = at.take(length * width);
  }
  return s;
}

VarlenBlock take_block(Scratch& at, int64_t head_dim, bool backward) {
  const int64_t width = round_up(head_dim);
  VarlenBlock b;
  b.q = at.take(kVarlenRows * width), b.o = at.take(kVarlenRows * width);
  b.scores = at.take(kVarlenRows * kVarlenKeys);
  b.grad_o = b.grads = nullptr;
  if (backward) b.grad_o = at.take(kVarlenRows * width), b.grads = at.take(kVarlenRows * kVarlenKeys);
  return b;
}

int64_t varlen_scratch(int64_t head_dim, int64_t prompt, int64_t completion, bool backward) {
  Scratch at{nullptr};
  take_keys(at, prompt, head_dim, backward);
  take_keys(at, completion, head_dim, backward);
  take_block(at, head_dim, backward);
  return at.used;
}

template <class T>
void widen_rows(const T* x, int64_t stride, int64_t rows, int64_t head_dim, float scale, float* out) {
  const int64_t width = round_up(head_dim);
  const Vec factor = Vec::splat(scale);
  for (int64_t r = 0; r < rows; r++)  // lanes behind the head's end are zero in a partial load
    for_each_vec(head_dim, [&](int64_t i, int n) { (load_n(x + r * stride + i, n) * factor).store(out + r * width + i); });
}

void transpose(const float* rows, int64_t length, int64_t head_dim, float* columns) {
  const int64_t width = round_up(head_dim), padded = round_up(length);
  for (int64_t j = 0; j < padded; j++)
    for (int64_t d = 0; d < head_dim; d++) columns[d * padded + j] = j < length ? rows[j * width + d] : 0.0f;
}

template <class T>
void load_keys(const VarlenArgs& a, int64_t kv_head, const Span& span, VarlenKeys& s) {
  const int64_t D = a.head_dim;
  s.span = span, s.padded = round_up(span.length);
  widen_rows(static_cast<const T*>(a.k) + span.start * a.k_stride + kv_head * D, a.k_stride, span.length, D, 1.0f, s.k);
  widen_rows(static_cast<const T*>(a.v) + span.start * a.v_stride + kv_head * D, a.v_stride, span.length, D, 1.0f, s.v);
  transpose(s.k, span.length, D, s.k_columns);
  if (s.v_columns == nullptr) return;
  transpose(s.v, span.length, D, s.v_columns);
  for (int64_t i = 0; i < span.length * round_up(D); i++) s.grad_k[i] = s.grad_v[i] = 0.0f;
}

// One step of a block: rows [first, first + rows) of their span against keys [begin, begin + count) of `keys`. Row r sees all
// of them, or, where the span is the rows' own, those up to itself.
struct VarlenStep {
  const VarlenKeys& keys;
  int64_t begin, count;
  bool causal;
  int64_t first;
  int rows;

  int64_t visible(int row) const {
    if (!causal) return count;
    const int64_t n = first + row + 1 - begin;
    return n < 0 ? 0 : n < count ? n : count;
  }
  int tile_rows(int row) const { return rows - row < kOuterRows ? rows - row : kOuterRows; }
  int64_t tile_visible(int row) const { return visible(row + tile_rows(row) - 1); }
  // The first row that sees key j.
  int64_t first_row(int64_t j) const {
    const int64_t r = causal ? begin + j - first : 0;
    return r < 0 ? 0 : r;
  }
};

template <class F>
inline void for_each_step(const VarlenKeys& keys, bool causal, int64_t first, int rows, F f) {
  const int64_t end = causal ? first + rows : keys.span.length;
  for (int64_t j = 0; j < end; j += kVarlenKeys) f(VarlenStep{keys, j, end - j < kVarlenKeys ? end - j : kVarlenKeys, causal, first, rows});
}

// scores[r] = a[r] . columns, up to what the tile of the row sees.
inline void product_with_columns(const VarlenStep& s, const float* a, const float* columns, int64_t head_dim, float* scores) {
  const int64_t width = round_up(head_dim);
  for (int r = 0; r < s.rows; r += kOuterRows)
    outer<false>(s.tile_rows(r), a + r * width, width, 1, columns + s.begin, s.keys.padded, head_dim,
                 scores + r * kVarlenKeys, kVarlenKeys, round_up(s.tile_visible(r)));
}

// out[r] += scores[r] . rows of k or v.
inline void add_product_with_rows(const VarlenStep& s, const float* scores, const float* rows, int64_t head_dim, float* out) {
  const int64_t width = round_up(head_dim);
  for (int r = 0; r < s.rows; r += kOuterRows)
    outer<true>(s.tile_rows(r), scores + r * kVarlenKeys, kVarlenKeys, 1, rows + s.begin * width, width, s.tile_visible(r),
                out + r * width, width, width);
}

// grad[j] += sum over rows r of scores[r][j] * x[r].
inline void add_product_over_rows(const VarlenStep& s, const float* scores, const float* x, int64_t head_dim, float* grad) {
  const int64_t width = round_up(head_dim);
  for (int64_t j = 0; j < s.count; j += kOuterRows) {
    const int keys = static_cast<int>(s.count - j < kOuterRows ? s.count - j : kOuterRows);
    const int64_t r = s.first_row(j);
    if (r >= s.rows) break;
    outer<true>(keys, scores + r * kVarlenKeys + j, 1, kVarlenKeys, x + r * width, width, s.rows - r,
                grad + (s.begin + j) * width, width, width);
  }
}

void clear_behind(float* row, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) row[i] = 0.0f;
}

// Scores -> exponentials under the row's running maximum; the output and the sum so far shrink when that rises.
void softmax_step(const VarlenStep& s, VarlenBlock& b, int64_t width) {
  for (int r = 0; r < s.rows; r++) {
    float* row = b.scores + r * kVarlenKeys;
    const int64_t visible = s.visible(r);
    Vec top = Vec::splat(b.max[r]);
    for_each_vec(visible, [&](int64_t i, int n) {
      Vec x = Vec::load(row + i);
      if (n < Vec::kWidth) x = Vec::keep_first(x, n, -__builtin_inff()), x.store(row + i);
      top = Vec::max(top, x);
    });
    const float max = top.max();
    const Vec shift = Vec::splat(max);
    Vec sum = Vec::zero();
    for_each_vec(visible, [&](int64_t i, int) {
      const Vec p = exp(Vec::load(row + i) - shift);
      p.store(row + i);
      sum = sum + p;
    });
    clear_behind(row, round_up(visible), s.tile_visible(r / kOuterRows * kOuterRows));
    if (!(max == b.max[r])) {
      float factor[Vec::kWidth];
      exp(Vec::splat(b.max[r] - max)).store(factor);
      b.sum[r] *= factor[0];
      for (int64_t i = 0; i < width; i += Vec::kWidth)
        (Vec::load(b.o + r * width + i) * Vec::splat(factor[0])).store(b.o + r * width + i);
      b.max[r] = max;
    }
    b.sum[r] += sum.sum();
  }
}

template <class T>
void varlen_rows(const VarlenArgs& a, VarlenBlock& b, int64_t head, const Span& span, int64_t first, int rows,
                 const VarlenKeys* prompt, const VarlenKeys& own) {
  const int64_t D = a.head_dim, width = round_up(D), row = span.start + first;
  widen_rows(static_cast<const T*>(a.q) + row * a.q_stride + head * D, a.q_stride, rows, D, a.scale, b.q);
  clear_behind(b.o, 0, rows * width);
  for (int r = 0; r < rows; r++) b.max[r] = -__builtin_inff(), b.sum[r] = 0.0f;
  auto step = [&](const VarlenStep& s) {
    product_with_columns(s, b.q, s.keys.k_columns, D, b.scores);
    softmax_step(s, b, width);
    add_product_with_rows(s, b.scores, s.keys.v, D, b.o);
  };
  if (prompt != nullptr) for_each_step(*prompt, false, first, rows, step);
  for_each_step(own, true, first, rows, step);
  for (int r = 0; r < rows; r++) {
    const Vec sum = Vec::splat(b.sum[r]);
    T* out = static_cast<T*>(a.out) + ((row + r) * a.num_heads + head) * D;
    for_each_vec(D, [&](int64_t i, int n) { store_n(out + i, Vec::load(b.o + r * width + i) / sum, n); });
    a.lse[(row + r) * a.num_heads + head] = b.max[r] + __builtin_logf(b.sum[r]);
  }
}

// scores -> probabilities p under the saved log-sum-exp; grads (d loss / d p) -> gradient of the scores, p (grads - delta).
void softmax_backward_step(const VarlenStep& s, VarlenBlock& b) {
  const int64_t end = round_up(s.visible(s.rows - 1));
  for (int r = 0; r < s.rows; r++) {
    float *p = b.scores + r * kVarlenKeys, *g = b.grads + r * kVarlenKeys;
    const Vec lse = Vec::splat(b.lse[r]), delta = Vec::splat(b.delta[r]);
    const int64_t visible = s.visible(r);
    for_each_vec(visible, [&](int64_t i, int n) {
      Vec x = exp(Vec::load(p + i) - lse);
      Vec d = x * (Vec::load(g + i) - delta);
      if (n < Vec::kWidth) x = Vec::keep_first(x, n, 0.0f), d = Vec::keep_first(d, n, 0.0f);
      x.store(p + i), d.store(g + i);
    });
    clear_behind(p, round_up(visible), end);
    clear_behind(g, round_up(visible), end);
  }
}

template <class T>
void varlen_rows_backward(const VarlenArgs& a, VarlenBlock& b, int64_t head, const Span& span, int64_t first, int rows,
                          const VarlenKeys* prompt, const VarlenKeys& own) {
  const int64_t D = a.head_dim, width = round_up(D), row = span.start + first, stride = a.num_heads * D;
  const T* grad_out = static_cast<const T*>(a.grad_out) + (row * a.num_heads + head) * D;
  const T* out = static_cast<const T*>(a.out) + (row * a.num_heads + head) * D;
  widen_rows(static_cast<const T*>(a.q) + row * a.q_stride + head * D, a.q_stride, rows, D, a.scale, b.q);
  widen_rows(grad_out, stride, rows, D, 1.0f, b.grad_o);
  clear_behind(b.o, 0, rows * width);
  for (int r = 0; r < rows; r++) {
    Vec dot = Vec::zero();
    for_each_vec(D, [&](int64_t i, int n) { dot = Vec::fma(load_n(grad_out + r * stride + i, n), load_n(out + r * stride + i, n), dot); });
    b.delta[r] = dot.sum();
    b.lse[r] = a.lse[(row + r) * a.num_heads + head];
  }
  auto step = [&](const VarlenStep& s) {
    product_with_columns(s, b.q, s.keys.k_columns, D, b.scores);
    product_with_columns(s, b.grad_o, s.keys.v_columns, D, b.grads);
    softmax_backward_step(s, b);
    add_product_over_rows(s, b.scores, b.grad_o, D, s.keys.grad_v);
    add_product_over_rows(s, b.grads, b.q, D, s.keys.grad_k);  // q is scaled already
    add_product_with_rows(s, b.grads, s.keys.k, D, b.o);
  };
  if (prompt != nullptr) for_each_step(*prompt, false, first, rows, step);
  for_each_step(own, true, first, rows, step);
  T* grad_q = static_cast<T*>(a.grad_q) + (row * a.num_heads + head) * D;
  const Vec scale = Vec::splat(a.scale);
  for (int r = 0; r < rows; r++)
    for_each_vec(D, [&](int64_t i, int n) { store_n(grad_q + r * stride + i, Vec::load(b.o + r * width + i) * scale, n); });
}

template <class T>
void store_grads(const VarlenArgs& a, int64_t kv_head, const VarlenKeys& s) {
  const int64_t D = a.head_dim, width = round_up(D);
  for (int64_t j = 0; j < s.span.length; j++) {
    const int64_t at = ((s.span.start + j) * a.num_kv_heads + kv_head) * D;
    for_each_vec(D, [&](int64_t i, int n) {
      store_n(static_cast<T*>(a.grad_k) + at + i, Vec::load(s.grad_k + j * width + i), n);
      store_n(static_cast<T*>(a.grad_v) + at + i, Vec::load(s.grad_v + j * width + i), n);
    });
  }
}

void store_partial_grads(const VarlenArgs& a, int64_t kv_head, const VarlenKeys& s, float* out) {
  const int64_t D = a.head_dim, width = round_up(D);
  for (int64_t j = 0; j < s.span.length; j++) {
    float* at = out + (j * a.num_kv_heads + kv_head) * 2 * D;
    for_each_vec(D, [&](int64_t i, int n) {
      store_n(at + i, Vec::load(s.grad_k + j * width + i), n);
      store_n(at + D + i, Vec::load(s.grad_v + j * width + i), n);
    });
  }
}

template <class T, bool BACKWARD>
void varlen_range(const VarlenArgs& a, float* scratch, int64_t begin, int64_t end) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  for (int64_t item = begin; item < end; item++) {
    const VarlenPart& part = a.parts[item / a.num_kv_heads];
    const int64_t kv_head = item % a.num_kv_heads;
    int64_t longest = 0;
    for (int64_t c = 0; c < part.num_completions; c++)
      longest = part.completions[c].length > longest ? part.completions[c].length : longest;
    Scratch at{scratch};
    VarlenKeys prompt = take_keys(at, part.prompt.length, a.head_dim, BACKWARD);
    VarlenKeys own = take_keys(at, longest, a.head_dim, BACKWARD);
    VarlenBlock block = take_block(at, a.head_dim, BACKWARD);
    auto rows_of = [&](int64_t first, int64_t last, const VarlenKeys* shared, const VarlenKeys& keys) {
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int64_t r = first; r < last; r += kVarlenRows) {
          const int rows = static_cast<int>(last - r < kVarlenRows ? last - r : kVarlenRows);
          if (BACKWARD)
            varlen_rows_backward<T>(a, block, head, keys.span, r, rows, shared, keys);
          else
            varlen_rows<T>(a, block, head, keys.span, r, rows, shared, keys);
        }
    };
    load_keys<T>(a, kv_head, part.prompt, prompt);
    rows_of(part.prompt_begin, part.prompt_end, nullptr, prompt);
    for (int64_t c = 0; c < part.num_completions; c++) {
      load_keys<T>(a, kv_head, part.completions[c], own);
      rows_of(0, part.completions[c].length, &prompt, own);
      if (BACKWARD) store_grads<T>(a, kv_head, own);
    }
    if (BACKWARD) {
      if (part.prompt_grad != nullptr)
        store_partial_grads(a, kv_head, prompt, part.prompt_grad);
      else
        store_grads<T>(a, kv_head, prompt);
    }
  }
}

void varlen(const VarlenArgs& a, float* scratch, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? varlen_range<float, false>(a, scratch, begin, end)
                             : varlen_range<bf16_t, false>(a, scratch, begin, end);
}

void varlen_backward(const VarlenArgs& a, float* scratch, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? varlen_range<float, true>(a, scratch, begin, end)
                             : varlen_range<bf16_t, true>(a, scratch, begin, end);
}

}  // namespace
