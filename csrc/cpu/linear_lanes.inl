// Products whose columns lie in the lanes, panel by panel: what linear_short.inl and linear_columns.inl have in common.
//
// Either defines which products are short (is_short), how a panel of kLanePanel columns is laid out (lay_out_panel), how many rows
// meet it at a time (kLaneRows) and how they do (add_lanes). X is the type of x as it is multiplied, W that of the weights.
#pragma once

namespace {

template <int ROWS, class X, class W, class Y>
inline __attribute__((always_inline)) void lane_tile(const LinearArgs& a, const X* x, int64_t x_stride, const W* panel,
                                                     const Vec* bias, int columns, Y* y, Prefetch& prefetch) {
  Vec sum[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = Vec::zero();
  for (int64_t k = 0; k < a.K; k += kStepsPerFetch) {
    prefetch.advance();
    add_lanes<ROWS>(sum, x, x_stride, panel, k, k + kStepsPerFetch < a.K ? k + kStepsPerFetch : a.K);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int i = 0; i < 2; i++)
      if (const int n = columns - i * Vec::kWidth; n > 0)
        store_n(y + r * a.y_stride + i * Vec::kWidth, sum[r][i] + bias[i], n < Vec::kWidth ? n : Vec::kWidth);
}

template <int ROWS, class X, class W, class Y>
void lane_rows(int64_t rows, const LinearArgs& a, const X* x, int64_t x_stride, const W* panel, const Vec* bias, int columns, Y* y,
               Prefetch& prefetch) {
  if (rows == ROWS)
    lane_tile<ROWS>(a, x, x_stride, panel, bias, columns, y, prefetch);
  else if constexpr (ROWS > 1)
    lane_rows<ROWS - 1>(rows, a, x, x_stride, panel, bias, columns, y, prefetch);
}

// One panel against `rows` rows of x.
template <class W, class X, class Y>
void short_item(const LinearArgs& a, const X* x, int64_t x_stride, int64_t rows, int64_t first_column, Y* y) {
  alignas(64) W laid_out[kMostShortK * kLanePanel];
  const int64_t left = a.N - first_column, panel_size = kLanePanel * a.K;
  const int columns = static_cast<int>(left < kLanePanel ? left : kLanePanel);
  const W* panel = laid_out;
  Prefetch prefetch;  // nothing to fetch for one tile: its panels are a stream of their own
  if (a.packed_weight == nullptr) {
    lay_out_panel(a, first_column, laid_out);
  } else {
    panel = static_cast<const W*>(a.packed_weight) + first_column * a.K;
    if (left > kLanePanel && rows > kLaneRows<W>) {
      const int64_t tiles = (rows + kLaneRows<W> - 1) / kLaneRows<W>, lines = panel_size * int64_t{sizeof(W)} / 64;
      const int64_t fetches = tiles * ((a.K + kStepsPerFetch - 1) / kStepsPerFetch);
      prefetch.at = reinterpret_cast<const char*>(panel + panel_size), prefetch.end = prefetch.at + lines * 64;
      prefetch.lines_at_once = (lines + fetches - 1) / fetches;
    }
  }
  Vec bias[2] = {Vec::zero(), Vec::zero()};
  if (a.bias != nullptr)
    for (int i = 0; i < 2; i++)
      if (const int n = columns - i * Vec::kWidth; n > 0)
        bias[i] = load_n(static_cast<const Y*>(a.bias) + first_column + i * Vec::kWidth, n < Vec::kWidth ? n : Vec::kWidth);
  for (int64_t r = 0, n; r < rows; r += n) {
    n = rows_of_tile(rows - r, kLaneRows<W>);
    lane_rows<kLaneRows<W>>(n, a, x + r * x_stride, x_stride, panel, bias, columns, y + r * a.y_stride, prefetch);
  }
}

int64_t short_items(const LinearArgs& a) {
  return (a.M + kMaxBlock - 1) / kMaxBlock * ((a.N + kLanePanel - 1) / kLanePanel);
}

template <class W, class Y, class X>
void short_panels(const LinearArgs& a, const X* x, int64_t x_stride, int64_t begin, int64_t end) {
  const int64_t panels = (a.N + kLanePanel - 1) / kLanePanel;
  for (int64_t i = begin; i < end; i++) {
    const int64_t first_row = i / panels * kMaxBlock, first_column = i % panels * kLanePanel, left = a.M - first_row;
    short_item<W>(a, x + first_row * x_stride, x_stride, left < kMaxBlock ? left : kMaxBlock, first_column,
                  static_cast<Y*>(a.y) + first_row * a.y_stride + first_column);
  }
}

template <class W, class X>
void short_range(const LinearArgs& a, const X* x, int64_t x_stride, int64_t begin, int64_t end) {
  a.y_dtype == Dtype::kFloat32 ? short_panels<W, float>(a, x, x_stride, begin, end)
                               : short_panels<W, bf16_t>(a, x, x_stride, begin, end);
}

}  // namespace
