// The one inner loop of all dense work: ROWS x COLS dot products at a time, with one vector accumulator each.
//
// Both operands are read along their contiguous dimension, so nothing has to be repacked. A dot product is always
// accumulated lane by lane in ascending order into one vector and reduced by the tree of Vec::sum4; which tile it falls into
// has no influence on its bits. 3 x 4 keeps 12 accumulators and 3 inputs in 16 registers, and needs 7 loads for 12
// multiply-adds, so that it is bound by arithmetic.
#pragma once

namespace {

// out[r][c] (+)= dot(x row r, w row c) over `width` elements.
template <int ROWS, int COLS, bool ACCUMULATE, class W>
inline __attribute__((always_inline)) void dot_tile(const float* const* x, const W* const* w, int64_t width,
                                                    float* const* out) {
  static_assert(COLS % 4 == 0, "four sums are reduced at a time");
  Vec acc[ROWS][COLS];
  const float* xr[ROWS];
  const W* wc[COLS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) xr[r] = x[r];
#pragma GCC unroll 16
  for (int c = 0; c < COLS; c++) wc[c] = w[c];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c++) acc[r][c] = Vec::zero();

  int64_t i = 0;
#pragma GCC unroll 2
  for (; i + Vec::kWidth <= width; i += Vec::kWidth) {
    Vec a[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) a[r] = Vec::load(xr[r] + i);
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c++) {
      Vec b = Vec::load(wc[c] + i);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) acc[r][c] = Vec::fma(a[r], b, acc[r][c]);
    }
  }
  if (i < width) {
    int n = static_cast<int>(width - i);
    Vec a[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) a[r] = Vec::load_partial(xr[r] + i, n);
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c++) {
      Vec b = Vec::load_partial(wc[c] + i, n);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) acc[r][c] = Vec::fma(a[r], b, acc[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c += 4) {
      float sums[4];
      Vec::sum4(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3], sums);
      for (int j = 0; j < 4; j++) out[r][c + j] = ACCUMULATE ? out[r][c + j] + sums[j] : sums[j];
    }
}

}  // namespace
