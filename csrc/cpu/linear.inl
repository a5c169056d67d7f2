// y = x W^T (+ bias) with W row-major and unpacked.
//
// The columns of y are cut into panels of 16 or 32 weight rows, the rows of y into blocks whose x stays in the L2 cache; one panel
// of one block is a work item. Within an item k is cut into ranges (a function of K alone) such that the panel's slice stays
// in the L1 cache, or next to it, while all rows of the block pass by. An output is the sum, in ascending order of the ranges,
// of one dot product per range, plus the bias: the same for every M, panel position and thread. Where K is short,
// linear_short.inl or linear_columns.inl serve at some levels.
#pragma once

namespace {

constexpr int64_t kPanelBytes = 24 * 1024;  // of a panel's slice, in a 32 KB L1 cache
constexpr int kMaxPanel = 32;               // weight rows per panel at most
constexpr int64_t kMaxBlock = 192;          // rows of x per block at most
constexpr int64_t kBlockBytes = 256 * 1024;
constexpr int kTileRows = Vec::kWidth >= 16 ? 6 : 3;  // as many as accumulators fit into the registers beside 4 columns
constexpr int64_t kFewRows = 8;  // so many rows of x stay in the L1 cache beside four columns of a panel

// What differs between the products: how elements meet, and their types in memory.
template <class DOT, class X, class W>
struct Product {
  using Dot = DOT;
  using XType = X;
  using WType = W;
  // Elements of k per range, and of those between two bursts of fetches. A range of bf16 has half as many steps as one of fp32,
  // so the sums across lanes at its end weigh more: a slice of 30 KB, part of which comes from the L2 cache, gains more than it
  // loses, if the next one is fetched in smaller bursts.
  static constexpr int64_t kMaxRange = sizeof(X) == 2 ? 960 : kPanelBytes / 16 / static_cast<int64_t>(sizeof(X));
  static constexpr int64_t kStretch = sizeof(X) == 2 ? 14 * Dot::kWidth : kMaxRange;
};

// Weight rows per panel: 16, or 32 where so many fit, which makes a cache line of bf16 results.
template <class P>
int64_t panel_columns(int64_t K) {
  return K * kMaxPanel * static_cast<int64_t>(sizeof(typename P::XType)) <= kPanelBytes ? kMaxPanel : kMaxPanel / 2;
}

template <class P>
int64_t block_rows(int64_t K) {
  int64_t rows = kBlockBytes / (K * static_cast<int64_t>(sizeof(typename P::XType)) + 1);
  rows = rows > kMaxBlock ? kMaxBlock : rows;
  return rows < 48 ? 48 : rows / 6 * 6;
}

template <class P>
int64_t range_size(int64_t K) {
  const int64_t ranges = (K + P::kMaxRange - 1) / P::kMaxRange;
  if (ranges <= 1) return K;
  return ((K + ranges - 1) / ranges + P::Dot::kWidth - 1) / P::Dot::kWidth * P::Dot::kWidth;
}

// Fetches the next panel into the L2 cache, some lines per stretch of a tile of the present one, so that weights that come from
// memory arrive while there is still arithmetic to do.
struct Prefetch {
  const char *at = nullptr, *end = nullptr;
  int64_t lines_at_once = 0;

  void advance() {
    const char* stop = at + lines_at_once * 64;
    stop = stop < end ? stop : end;
    for (; at < stop; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

template <class P>
Prefetch prefetch_panel(const LinearArgs& a, int64_t column, int64_t rows) {
  using W = typename P::WType;
  Prefetch p;
  if (column >= a.N || a.weight_stride != a.K) return p;
  const int64_t most = panel_columns<P>(a.K), columns = a.N - column < most ? a.N - column : most;
  const int64_t range = range_size<P>(a.K);
  // A single row takes the columns of a tile one after the other.
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows * (rows == 1 ? most : most / 4) * ((a.K + range - 1) / range);
  const int64_t bursts = tiles * ((range + P::kStretch - 1) / P::kStretch);
  p.at = static_cast<const char*>(a.weight) + column * a.K * int64_t{sizeof(W)};
  p.end = p.at + columns * a.K * int64_t{sizeof(W)};
  p.lines_at_once = ((p.end - p.at) / 64 + bursts - 1) / bursts;
  return p;
}

// A panel's slice, as it lies in memory or widened.
template <class W>
struct Panel {
  const W* w;
  int64_t stride, width;
  int columns;  // a tile that reaches beyond repeats the last one
};

// Columns [begin, end) of a panel, four at a time also for few rows: they follow each other in memory, which is what makes
// memory fast.
template <class P, int ROWS, bool ACCUMULATE, class X, class W>
inline __attribute__((always_inline)) void panel_rows(const X* x, int64_t x_stride, const Panel<W>& panel, int begin, int end,
                                                      float* out, Prefetch& prefetch) {
  const X* xr[ROWS];
  const W* wc[4];
  float* o[ROWS];
  for (int r = 0; r < ROWS; r++) xr[r] = x + r * x_stride, o[r] = out + r * kMaxPanel + begin;
  for (int c = begin; c < end; c += 4) {
    for (int j = 0; j < 4; j++) wc[j] = panel.w + (c + j < panel.columns ? c + j : panel.columns - 1) * panel.stride;
    dot_tile<typename P::Dot, ROWS, 4, ACCUMULATE, P::kStretch>(xr, wc, panel.width, o, [&] { prefetch.advance(); });
    for (int r = 0; r < ROWS; r++) o[r] += 4;
  }
}

template <class P, int ROWS, bool ACCUMULATE, class X, class W>
void panel_few_rows(int64_t rows, const X* x, int64_t x_stride, const Panel<W>& panel, int begin, int end, float* out,
                    Prefetch& prefetch) {
  if (rows == ROWS)
    panel_rows<P, ROWS, ACCUMULATE>(x, x_stride, panel, begin, end, out, prefetch);
  else if constexpr (ROWS > 1)
    panel_few_rows<P, ROWS - 1, ACCUMULATE>(rows, x, x_stride, panel, begin, end, out, prefetch);
}

// How many of `left` rows the next tile takes, `most` at a time: the last ones in equal parts.
inline int64_t rows_of_tile(int64_t left, int64_t most) {
  return left >= 2 * most ? most : left > most ? (left + 1) / 2 : left;
}

// All rows of a block against one panel slice; done(r, n, sums) is told of rows [r, r + n) and where their sums are. With one
// range only, they take turns in the same few rows of `out`.
template <class P, bool ACCUMULATE, class X, class W, class Done>
void panel_block(const X* x, int64_t x_stride, int64_t rows, const Panel<W>& panel, float* out, bool one_range,
                 Prefetch& prefetch, const Done& done) {
  if (rows > kTileRows && rows <= kFewRows && panel.width * panel.columns * int64_t{sizeof(W)} > kPanelBytes) {
    // Four columns against all rows, then the next four: the slice is too large for a second tile to find it in the L1 cache.
    for (int c = 0; c < panel.columns; c += 4)
      for (int64_t r = 0, n; r < rows; r += n) {
        n = rows_of_tile(rows - r, kTileRows);
        panel_few_rows<P, kTileRows, ACCUMULATE>(n, x + r * x_stride, x_stride, panel, c, c + 4, out + r * kMaxPanel, prefetch);
      }
    return done(0, rows, out);
  }
  for (int64_t r = 0, n; r < rows; r += n) {
    float* sums = out + (one_range ? 0 : r * kMaxPanel);
    n = rows_of_tile(rows - r, kTileRows);
    if (n == kTileRows)
      panel_rows<P, kTileRows, ACCUMULATE>(x + r * x_stride, x_stride, panel, 0, panel.columns, sums, prefetch);
    else
      panel_few_rows<P, kTileRows, ACCUMULATE>(n, x + r * x_stride, x_stride, panel, 0, panel.columns, sums, prefetch);
    done(r, n, sums);
  }
}

inline void widen_panel(const Panel<bf16_t>& panel, float* out, int64_t stride) {
  for (int c = 0; c < panel.columns; c++)
    for_each_vec(panel.width, [&](int64_t i, int n) {
      store_n(out + c * stride + i, load_n(panel.w + c * panel.stride + i, n), n);
    });
}

template <class P, class Y>
void linear_item(const LinearArgs& a, const typename P::XType* x, int64_t x_stride, int64_t rows, int64_t first_column, Y* y) {
  using X = typename P::XType;
  using W = typename P::WType;
  constexpr bool kWidens = !std::is_same<X, W>::value;
  const int64_t panel_size = panel_columns<P>(a.K);
  alignas(64) float widened[kWidens ? kPanelBytes / 4 : 1];
  alignas(64) float out[kMaxBlock * kMaxPanel];
  alignas(64) float bias[kMaxPanel] = {};
  const int columns = static_cast<int>(a.N - first_column < panel_size ? a.N - first_column : panel_size);
  if (a.bias != nullptr)
    for_each_vec(columns, [&](int64_t i, int n) {
      store_n(bias + i, load_n(static_cast<const Y*>(a.bias) + first_column + i, n), n);
    });
  auto finish = [&](int64_t first, int64_t count, const float* sums) {
    for (int64_t r = 0; r < count; r++)
      for_each_vec(columns, [&](int64_t i, int n) {
        store_n(y + (first + r) * a.y_stride + i, Vec::load(sums + r * kMaxPanel + i) + Vec::load(bias + i), n);
      });
  };

  const int64_t range = range_size<P>(a.K);
  const bool one_range = range >= a.K;
  const W* weight = static_cast<const W*>(a.weight) + first_column * a.weight_stride;
  Prefetch prefetch = prefetch_panel<P>(a, first_column + panel_size, rows);
  for (int64_t k = 0; k == 0 || k < a.K; k += range) {
    Panel<W> panel{weight + k, a.weight_stride, a.K - k < range ? a.K - k : range, columns};
    auto block = [&](const auto& slice) {
      const X* xk = x + k;
      if (k > 0)
        panel_block<P, true>(xk, x_stride, rows, slice, out, one_range, prefetch, [](int64_t, int64_t, const float*) {});
      else if (one_range)
        panel_block<P, false>(xk, x_stride, rows, slice, out, one_range, prefetch, finish);
      else
        panel_block<P, false>(xk, x_stride, rows, slice, out, one_range, prefetch, [](int64_t, int64_t, const float*) {});
    };
    if constexpr (kWidens) {
      if (rows > 2 * kTileRows) {  // fewer rows widen as they go
        widen_panel(panel, widened, range);
        block(Panel<float>{widened, range, panel.width, columns});
      } else {
        block(panel);
      }
    } else {
      block(panel);
    }
    if (range == 0) break;
  }
  if (!one_range) finish(0, rows, out);
}

template <class P, class Y>
void linear_range(const LinearArgs& a, const void* x, int64_t x_stride, int64_t begin, int64_t end) {
  const int64_t columns = panel_columns<P>(a.K), panels = (a.N + columns - 1) / columns, block = block_rows<P>(a.K);
  for (int64_t i = begin; i < end; i++) {
    const int64_t first_row = i / panels * block, first_column = i % panels * columns;
    linear_item<P>(a, static_cast<const typename P::XType*>(x) + first_row * x_stride, x_stride,
                   a.M - first_row < block ? a.M - first_row : block, first_column,
                   static_cast<Y*>(a.y) + first_row * a.y_stride + first_column);
  }
}

template <class P>
void linear_range(const LinearArgs& a, const void* x, int64_t x_stride, int64_t begin, int64_t end) {
  a.y_dtype == Dtype::kFloat32 ? linear_range<P, float>(a, x, x_stride, begin, end)
                               : linear_range<P, bf16_t>(a, x, x_stride, begin, end);
}

template <class P>
int64_t product_items(const LinearArgs& a) {
  const int64_t block = block_rows<P>(a.K), columns = panel_columns<P>(a.K);
  return (a.M + block - 1) / block * ((a.N + columns - 1) / columns);
}

#ifdef SAGC_BF16_DOT
using Bf16Product = Product<SAGC_BF16_DOT, bf16_t, bf16_t>;
#endif

// Both operands bf16, and instructions for it: nothing has to be widened.
inline bool meets_in_bf16(const LinearArgs& a) {
#ifdef SAGC_BF16_DOT
  return a.x_dtype == Dtype::kBFloat16 && a.weight_dtype == Dtype::kBFloat16;
#else
  return false;
#endif
}

inline int64_t weight_bytes(const LinearArgs& a) { return a.weight_dtype == Dtype::kFloat32 ? 4 : 2; }

int64_t linear_scratch(const LinearArgs& a) {
  return a.x_dtype == Dtype::kFloat32 || meets_in_bf16(a) ? 0 : a.M * a.K * int64_t{sizeof(float)};
}

// bf16 rows as fp32, once for all panels.
void linear_pack(const LinearArgs& a, int64_t begin, int64_t end) {
  if (linear_scratch(a) == 0) return;
  for (int64_t r = begin; r < end; r++) {
    const bf16_t* x = static_cast<const bf16_t*>(a.x) + r * a.x_stride;
    float* out = static_cast<float*>(a.scratch) + r * a.K;
    for_each_vec(a.K, [&](int64_t i, int n) { store_n(out + i, load_n(x + i, n), n); });
  }
}

}  // namespace

#if defined(SAGC_BF16_DOT) || defined(SAGC_LANES_OF_COLUMNS)
#define SAGC_SHORT
namespace {

constexpr int64_t kShortK = 512, kShortColumns = 8192;          // at most
constexpr int64_t kMostShortK = 1024, kSmallWeights = 1 << 18;  // or so few weights in all

// Whether weights of this shape are worth a second copy in another layout: it is small (8 MB in bf16 at most).
bool is_short_shape(const LinearArgs& a) {
  return a.K > 0 && a.K % 2 == 0 && a.N <= kShortColumns &&
         (a.K <= kShortK || (a.K <= kMostShortK && a.K * a.N <= kSmallWeights));
}

}  // namespace

#ifdef SAGC_BF16_DOT
#include "linear_short.inl"
#else
#include "linear_columns.inl"
#endif
#include "linear_lanes.inl"
#endif

// The functions of the table.
namespace {

int64_t linear_packed_bytes(const LinearArgs& a) {
#ifdef SAGC_SHORT
  if (is_short(a)) return (a.N + kLanePanel - 1) / kLanePanel * kLanePanel * a.K * weight_bytes(a);
#endif
  return 0;
}

void linear_pack_weight(const LinearArgs& a, void* out) {
#ifdef SAGC_SHORT
  for (int64_t c = 0; c < a.N; c += kLanePanel) {
    char* panel = static_cast<char*>(out) + c * a.K * weight_bytes(a);
#ifdef SAGC_LANES_OF_COLUMNS
    if (a.weight_dtype == Dtype::kFloat32) {
      lay_out_panel(a, c, reinterpret_cast<float*>(panel));
      continue;
    }
#endif
    lay_out_panel(a, c, reinterpret_cast<bf16_t*>(panel));
  }
#endif
}

int64_t linear_items(const LinearArgs& a) {
#ifdef SAGC_SHORT
  if (is_short(a)) return short_items(a);
#endif
#ifdef SAGC_BF16_DOT
  if (meets_in_bf16(a)) return product_items<Bf16Product>(a);
#endif
  return product_items<Product<FloatDot, float, float>>(a);
}

void linear(const LinearArgs& a, int64_t begin, int64_t end) {
#ifdef SAGC_BF16_DOT
  if (is_short(a)) return short_range<bf16_t>(a, static_cast<const bf16_t*>(a.x), a.x_stride, begin, end);
  if (meets_in_bf16(a)) return linear_range<Bf16Product>(a, a.x, a.x_stride, begin, end);
#endif
  const bool is_widened = linear_scratch(a) > 0;
  const void* x = is_widened ? a.scratch : a.x;
  const int64_t x_stride = is_widened ? a.K : a.x_stride;
#ifdef SAGC_LANES_OF_COLUMNS
  if (is_short(a))
    return a.weight_dtype == Dtype::kFloat32 ? short_range<float>(a, static_cast<const float*>(x), x_stride, begin, end)
                                             : short_range<bf16_t>(a, static_cast<const float*>(x), x_stride, begin, end);
#endif
  a.weight_dtype == Dtype::kFloat32 ? linear_range<Product<FloatDot, float, float>>(a, x, x_stride, begin, end)
                                    : linear_range<Product<FloatDot, float, bf16_t>>(a, x, x_stride, begin, end);
}

}  // namespace
