// y = x W^T (+ bias) with W row-major and unpacked.
//
// The columns of y are cut into panels of 16 weight rows, the rows of y into blocks whose x stays in the L2 cache; one panel
// of one block is a work item. Within an item k is cut into ranges (a function of K alone) such that the panel's slice stays
// in the L1 cache while all rows of the block pass by. An output is the sum, in ascending order of the ranges, of one dot
// product per range, plus the bias: the same for every M, panel position and thread.
#pragma once

namespace {

constexpr int kPanel = 16;           // weight rows per panel: a cache line of y, and a multiple of the tile's 4 columns
constexpr int64_t kMaxRange = 384;   // elements of k per range: 16 x 384 x 4 bytes = 24 KB of a 32 KB L1 cache
constexpr int64_t kMaxBlock = 192;   // rows of x per block at most
constexpr int64_t kPrefetchRows = 3;
constexpr int64_t kBlockBytes = 256 * 1024;

inline int64_t block_rows(int64_t K) {
  int64_t rows = kBlockBytes / (K * static_cast<int64_t>(sizeof(float)) + 1);
  rows = rows > kMaxBlock ? kMaxBlock : rows;
  return rows < 48 ? 48 : rows / 6 * 6;
}

inline int64_t range_size(int64_t K) {
  int64_t ranges = (K + kMaxRange - 1) / kMaxRange;
  if (ranges <= 1) return K;
  int64_t size = (K + ranges - 1) / ranges;
  return (size + Vec::kWidth - 1) / Vec::kWidth * Vec::kWidth;
}

// Fetches the next panel into the L2 cache, some lines per tile of the present one, so that weights that come from memory
// arrive while there is still arithmetic to do. One or two rows have none to hide it behind: the hardware streams better.
struct Prefetch {
  const char *at = nullptr, *end = nullptr;
  int64_t lines_per_tile = 0;

  void advance() {
    const char* stop = at + lines_per_tile * 64;
    stop = stop < end ? stop : end;
    for (; at < stop; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

template <class W>
Prefetch prefetch_panel(const LinearArgs& a, int64_t column, int64_t rows) {
  Prefetch p;
  if (rows < kPrefetchRows || column >= a.N || a.weight_stride != a.K) return p;
  const int64_t columns = a.N - column < kPanel ? a.N - column : kPanel, range = range_size(a.K);
  const int64_t tiles = (rows + 2) / 3 * (kPanel / 4) * ((a.K + range - 1) / range);
  p.at = static_cast<const char*>(a.weight) + column * a.K * int64_t{sizeof(W)};
  p.end = p.at + columns * a.K * int64_t{sizeof(W)};
  p.lines_per_tile = ((p.end - p.at) / 64 + tiles - 1) / tiles;
  return p;
}

template <int ROWS, bool ACCUMULATE>
inline __attribute__((always_inline)) void panel_rows(const float* x, int64_t x_stride, const float* w, int64_t w_stride,
                                                      int64_t width, int columns, float* out, Prefetch& prefetch) {
  const float *xr[ROWS], *wc[4];
  float* o[ROWS];
  for (int r = 0; r < ROWS; r++) xr[r] = x + r * x_stride, o[r] = out + r * kPanel;
  for (int c = 0; c < columns; c += 4) {
    prefetch.advance();
    for (int j = 0; j < 4; j++) wc[j] = w + (c + j) * w_stride;
    dot_tile<ROWS, 4, ACCUMULATE>(xr, wc, width, o);
    for (int r = 0; r < ROWS; r++) o[r] += 4;
  }
}

// All rows of a block against one panel slice; `columns` is a multiple of 4.
template <bool ACCUMULATE>
void panel_block(const float* x, int64_t x_stride, int64_t rows, const float* w, int64_t w_stride, int64_t width, int columns,
                 float* out, Prefetch& prefetch) {
  int64_t r = 0;
  for (; r + 3 <= rows; r += 3)
    panel_rows<3, ACCUMULATE>(x + r * x_stride, x_stride, w, w_stride, width, columns, out + r * kPanel, prefetch);
  if (rows - r == 2)
    panel_rows<2, ACCUMULATE>(x + r * x_stride, x_stride, w, w_stride, width, columns, out + r * kPanel, prefetch);
  else if (rows - r == 1)
    panel_rows<1, ACCUMULATE>(x + r * x_stride, x_stride, w, w_stride, width, columns, out + r * kPanel, prefetch);
}

// The panel's slice as fp32 in `packed`, rows past `columns` zero.
template <class W>
void pack_panel(const W* w, int64_t w_stride, int columns, int64_t width, float* packed, int64_t packed_stride) {
  for (int c = 0; c < kPanel; c++) {
    float* p = packed + c * packed_stride;
    if (c < columns)
      for_each_vec(width, [&](int64_t i, int n) { store_n(p + i, load_n(w + c * w_stride + i, n), n); });
    else
      for (int64_t i = 0; i < width; i++) p[i] = 0.0f;
  }
}

template <class W, class Y>
void linear_item(const LinearArgs& a, int64_t first_row, int64_t rows, int64_t first_column) {
  alignas(64) float packed[kPanel * kMaxRange];
  alignas(64) float out[kMaxBlock * kPanel];
  const int columns = static_cast<int>(a.N - first_column < kPanel ? a.N - first_column : kPanel);
  const int padded = (columns + 3) / 4 * 4;
  const bool pack = !std::is_same<W, float>::value || padded != columns;
  const int64_t range = range_size(a.K);
  const W* weight = static_cast<const W*>(a.weight) + first_column * a.weight_stride;
  const bool packed_x = a.x_dtype != Dtype::kFloat32;
  const int64_t x_stride = packed_x ? a.K : a.x_stride;
  const float* x = static_cast<const float*>(packed_x ? a.scratch : a.x) + first_row * x_stride;

  Prefetch prefetch = prefetch_panel<W>(a, first_column + kPanel, rows);
  for (int64_t k = 0; k < a.K || k == 0; k += range) {
    const int64_t width = a.K - k < range ? a.K - k : range;
    const float* w = reinterpret_cast<const float*>(weight + k);
    int64_t w_stride = a.weight_stride;
    if (pack) {
      pack_panel(weight + k, a.weight_stride, columns, width, packed, range);
      w = packed, w_stride = range;
    }
    auto block = k == 0 ? panel_block<false> : panel_block<true>;
    block(x + k, x_stride, rows, w, w_stride, width, padded, out, prefetch);
    if (range == 0) break;
  }

  alignas(64) float bias[kPanel] = {};
  if (a.bias != nullptr)
    for_each_vec(columns, [&](int64_t i, int n) {
      store_n(bias + i, load_n(static_cast<const Y*>(a.bias) + first_column + i, n), n);
    });
  Y* y = static_cast<Y*>(a.y) + first_row * a.y_stride + first_column;
  for (int64_t r = 0; r < rows; r++)
    for_each_vec(columns, [&](int64_t i, int n) {
      store_n(y + r * a.y_stride + i, Vec::load(out + r * kPanel + i) + Vec::load(bias + i), n);
    });
}

int64_t linear_scratch(const LinearArgs& a) {
  return a.x_dtype == Dtype::kFloat32 ? 0 : a.M * a.K * int64_t{sizeof(float)};
}

// bf16 rows as fp32, once for all panels.
void linear_pack(const LinearArgs& a, int64_t begin, int64_t end) {
  if (a.x_dtype == Dtype::kFloat32) return;
  for (int64_t r = begin; r < end; r++) {
    const bf16_t* x = static_cast<const bf16_t*>(a.x) + r * a.x_stride;
    float* out = static_cast<float*>(a.scratch) + r * a.K;
    for_each_vec(a.K, [&](int64_t i, int n) { store_n(out + i, load_n(x + i, n), n); });
  }
}

int64_t linear_items(const LinearArgs& a) {
  int64_t block = block_rows(a.K);
  return (a.M + block - 1) / block * ((a.N + kPanel - 1) / kPanel);
}

template <class W, class Y>
void linear_range(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t panels = (a.N + kPanel - 1) / kPanel, block = block_rows(a.K);
  for (int64_t i = begin; i < end; i++) {
    int64_t first_row = i / panels * block;
    int64_t rows = a.M - first_row < block ? a.M - first_row : block;
    linear_item<W, Y>(a, first_row, rows, i % panels * kPanel);
  }
}

void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  const bool w32 = a.weight_dtype == Dtype::kFloat32, y32 = a.y_dtype == Dtype::kFloat32;
  if (w32)
    y32 ? linear_range<float, float>(a, begin, end) : linear_range<float, bf16_t>(a, begin, end);
  else
    y32 ? linear_range<bf16_t, float>(a, begin, end) : linear_range<bf16_t, bf16_t>(a, begin, end);
}

}  // namespace
