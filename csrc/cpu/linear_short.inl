// y = x W^T (+ bias) in bf16 where K is short: the columns of y in the lanes, over weights laid out for it. AVX512_BF16 only.
//
// With k in the lanes (linear.inl) an output ends in a sum across them, which at K = 288 is a fifth of the instructions. Here a
// panel of two vectors of columns lies as [K / 2][columns][2], a pair of k per lane and instruction; an output is one sum over
// ascending pairs in one lane, plus the bias, whatever M is. A decoder lays its weights out once per generate call, the
// operator a panel at a time while it multiplies: the same sums, the same bits. Which products are short depends on K and N
// alone, and is kept to matrices of which a second copy is small (8 MB at most).
#pragma once

namespace {

constexpr int64_t kShortK = 512, kShortColumns = 8192;  // at most
constexpr int kLanePanel = 2 * Vec::kWidth;
constexpr int kLaneRows = 8;  // two sums a row; twelve rows are slower at every M
constexpr int64_t kPairsPerFetch = 16;

bool is_short(const LinearArgs& a) {
  return meets_in_bf16(a) && a.K > 0 && a.K <= kShortK && a.K % 2 == 0 && a.N <= kShortColumns;
}

// Columns [first, first + kLanePanel) of y as a panel; those behind N are zeros.
void lay_out_panel(const LinearArgs& a, int64_t first, bf16_t* out) {
  const int64_t columns = a.N - first;
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int64_t c = 0; c < kLanePanel; c += Vec::kWidth) {
    const int64_t n = columns - c;
    const __mmask16 there = n >= Vec::kWidth ? 0xffff : n > 0 ? static_cast<__mmask16>((1u << n) - 1) : 0;
    const bf16_t* w = static_cast<const bf16_t*>(a.weight) + (first + (n > 0 ? c : 0)) * a.weight_stride;
    const __m512i offset = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int>(a.weight_stride)));
    for (int64_t k = 0; k < a.K; k += 2)
      _mm512_storeu_si512(out + k * kLanePanel + c * 2,
                          _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, offset, w + k, sizeof(bf16_t)));
  }
}

template <int ROWS, class Y>
inline __attribute__((always_inline)) void lane_tile(const LinearArgs& a, const bf16_t* x, const bf16_t* panel, const Vec* bias,
                                                     int columns, Y* y, Prefetch& prefetch) {
  Vec sum[ROWS][2];
  const bf16_t* xr[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = Vec::zero(), xr[r] = x + r * a.x_stride;
  for (int64_t k = 0; k < a.K;) {
    prefetch.advance();
    const int64_t some = k + 2 * kPairsPerFetch, stop = some < a.K ? some : a.K;
    for (; k < stop; k += 2, panel += 2 * kLanePanel) {
      const Bf16Dot::Operand w0 = Bf16Dot::load(panel), w1 = Bf16Dot::load(panel + kLanePanel);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        int pair;
        __builtin_memcpy(&pair, xr[r] + k, sizeof pair);
        const Bf16Dot::Operand v{_mm512_set1_epi32(pair)};
        sum[r][0] = Bf16Dot::fma(v, w0, sum[r][0]);
        sum[r][1] = Bf16Dot::fma(v, w1, sum[r][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int i = 0; i < 2; i++)
      if (const int n = columns - i * Vec::kWidth; n > 0)
        store_n(y + r * a.y_stride + i * Vec::kWidth, sum[r][i] + bias[i], n < Vec::kWidth ? n : Vec::kWidth);
}

template <int ROWS, class Y>
void lane_rows(int64_t rows, const LinearArgs& a, const bf16_t* x, const bf16_t* panel, const Vec* bias, int columns, Y* y,
               Prefetch& prefetch) {
  if (rows == ROWS)
    lane_tile<ROWS>(a, x, panel, bias, columns, y, prefetch);
  else if constexpr (ROWS > 1)
    lane_rows<ROWS - 1>(rows, a, x, panel, bias, columns, y, prefetch);
}

// One panel against `rows` rows of x.
template <class Y>
void short_item(const LinearArgs& a, const bf16_t* x, int64_t rows, int64_t first_column, Y* y) {
  alignas(64) bf16_t laid_out[kShortK * kLanePanel];
  const int64_t left = a.N - first_column, panel_size = kLanePanel * a.K;
  const int columns = static_cast<int>(left < kLanePanel ? left : kLanePanel);
  const bf16_t* panel = laid_out;
  Prefetch prefetch;  // nothing to fetch for one tile: its panels are a stream of their own
  if (a.packed_weight == nullptr) {
    lay_out_panel(a, first_column, laid_out);
  } else {
    panel = static_cast<const bf16_t*>(a.packed_weight) + first_column * a.K;
    if (left > kLanePanel && rows > kLaneRows) {
      const int64_t tiles = (rows + kLaneRows - 1) / kLaneRows, lines = panel_size * int64_t{sizeof(bf16_t)} / 64;
      const int64_t fetches = tiles * ((a.K / 2 + kPairsPerFetch - 1) / kPairsPerFetch);
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
    const int64_t rest = rows - r;  // the last rows in equal parts
    n = rest >= 2 * kLaneRows ? kLaneRows : rest > kLaneRows ? (rest + 1) / 2 : rest;
    lane_rows<kLaneRows>(n, a, x + r * a.x_stride, panel, bias, columns, y + r * a.y_stride, prefetch);
  }
}

int64_t short_items(const LinearArgs& a) {
  return (a.M + kMaxBlock - 1) / kMaxBlock * ((a.N + kLanePanel - 1) / kLanePanel);
}

template <class Y>
void short_range(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t panels = (a.N + kLanePanel - 1) / kLanePanel;
  for (int64_t i = begin; i < end; i++) {
    const int64_t first_row = i / panels * kMaxBlock, first_column = i % panels * kLanePanel, left = a.M - first_row;
    short_item(a, static_cast<const bf16_t*>(a.x) + first_row * a.x_stride, left < kMaxBlock ? left : kMaxBlock, first_column,
               static_cast<Y*>(a.y) + first_row * a.y_stride + first_column);
  }
}

void short_range(const LinearArgs& a, int64_t begin, int64_t end) {
  a.y_dtype == Dtype::kFloat32 ? short_range<float>(a, begin, end) : short_range<bf16_t>(a, begin, end);
}

}  // namespace
