// y^T = W x^T on AMX tiles, for bf16 rows of x and bf16 weights.
//
// A tile product is C[16][16] += A[16][32] B[32][16], with A row-major and B in pairs along k. With W in the place of A the
// weights are loaded from where they lie, sixteen rows at a time; only x, the small operand, is brought into the form of B,
// once per product. What comes out is the transpose of y, which is turned around on its way to memory.
//
// The names are those of the intrinsics, so that the same lines run on the hardware and on the model of it in amx_emulated.h.
// Include after vec_avx512.h. An output is the sum over steps of 32 along k in ascending order, whatever the other rows.
#pragma once

namespace {

constexpr int64_t kTile = 16;       // rows of W per A tile, rows of x per B tile
constexpr int64_t kTileStep = 32;   // elements of k per tile
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kAmxPanel = 2 * kTile;
constexpr int64_t kAmxBlockBytes = 1024 * 1024;  // packed rows of x per work item at most: half of an L2 cache

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};

// Tiles 0..3 are sums (weight tile x 2 + row tile), 4 and 5 weights, 6 and 7 rows of x. Weight tiles have as many rows as there
// are weights left: none behind the last one is touched.
inline void configure_tiles(int first_rows, int second_rows) {
  TileConfig config{};
  config.palette = 1;
  for (int t = 0; t < 8; t++) {
    const bool first = t == 0 || t == 1 || t == 4, second = t == 2 || t == 3 || t == 5;
    config.bytes_per_row[t] = 64;
    config.rows[t] = static_cast<uint8_t>(first ? first_rows : second ? second_rows : kTile);
    if (config.rows[t] == 0) config.bytes_per_row[t] = 0;
  }
  asm volatile("" : : "r"(&config) : "memory");  // the intrinsics do not tell the compiler what they read
  _tile_loadconfig(&config);
}

// Sixteen rows of sixteen 32-bit lanes, turned around.
inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)  // r[i + j]: column j of each quarter, four rows side by side
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  for (int j = 0; j < 4; j++) {
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    r[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    r[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

inline bool meets_on_amx(const LinearArgs& a) {
  return a.x_dtype == Dtype::kBFloat16 && a.weight_dtype == Dtype::kBFloat16 && a.K > 0;
}

inline int64_t tile_steps(int64_t K) { return (K + kTileStep - 1) / kTileStep; }

// A B tile for each step of k lies at scratch + (row / 16 * steps + step) * 1024: sixteen pairs of k, of sixteen rows each.
int64_t amx_scratch(const LinearArgs& a) { return (a.M + kTile - 1) / kTile * tile_steps(a.K) * kTileBytes; }

inline __mmask32 elements_mask(int64_t n) { return n >= kTileStep ? ~__mmask32{0} : (__mmask32{1} << n) - 1; }

// `count` rows of x from `row` on, the first of their tile; a tile's rows behind them are written as zeros.
inline void pack_tile_rows(const LinearArgs& a, int64_t row, int64_t count) {
  const bf16_t* x = static_cast<const bf16_t*>(a.x) + row * a.x_stride;
  char* out = static_cast<char*>(a.scratch) + row / kTile * tile_steps(a.K) * kTileBytes;
  for (int64_t k = 0; k < a.K; k += kTileStep, out += kTileBytes) {
    const __mmask32 mask = elements_mask(a.K - k);
    __m512i rows[16];
    for (int64_t r = 0; r < kTile; r++)
      rows[r] = r < count ? _mm512_maskz_loadu_epi16(mask, x + r * a.x_stride + k) : _mm512_setzero_si512();
    transpose16(rows);
    for (int64_t p = 0; p < kTile; p++) _mm512_store_si512(out + p * 64, rows[p]);
  }
}

// One row alone, for a range that begins or ends inside a tile.
inline void pack_one_row(const LinearArgs& a, int64_t row) {
  const bf16_t* x = static_cast<const bf16_t*>(a.x) + row * a.x_stride;
  char* out = static_cast<char*>(a.scratch) + row / kTile * tile_steps(a.K) * kTileBytes + row % kTile * 4;
  for (int64_t k = 0; k < a.K; k += kTileStep, out += kTileBytes) {
    alignas(64) uint32_t pairs[16];
    _mm512_store_si512(pairs, _mm512_maskz_loadu_epi16(elements_mask(a.K - k), x + k));
    for (int64_t p = 0; p < kTile; p++) __builtin_memcpy(out + p * 64, pairs + p, 4);
  }
}

void amx_pack(const LinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end;) {
    const int64_t count = a.M - row < kTile ? a.M - row : kTile;
    if (row % kTile == 0 && row + count <= end) {
      pack_tile_rows(a, row, count);
      row += count;
    } else {
      const int64_t tail = row - row % kTile;  // rows of this tile that do not exist: zeros, from whoever packs the last one
      if (row == a.M - 1)
        for (int64_t missing = a.M; missing < tail + kTile; missing++) {
          char* out = static_cast<char*>(a.scratch) + tail / kTile * tile_steps(a.K) * kTileBytes + missing % kTile * 4;
          for (int64_t p = 0; p < tile_steps(a.K) * kTile; p++) __builtin_memset(out + p * 64, 0, 4);
        }
      pack_one_row(a, row);
      row++;
    }
  }
}

// Columns of the sums (rows of x) [0, rows) of `count` weight rows each to y, which points to the first output.
template <class Y>
inline void store_outputs(const LinearArgs& a, const float* sums, int count, int64_t rows, int64_t column, Y* y) {
  __m512i lanes[16];
  for (int n = 0; n < 16; n++) lanes[n] = n < count ? _mm512_load_si512(sums + n * 16) : _mm512_setzero_si512();
  transpose16(lanes);
  const Vec bias = a.bias != nullptr ? load_n(static_cast<const Y*>(a.bias) + column, count) : Vec::zero();
  for (int64_t r = 0; r < rows; r++) store_n(y + r * a.y_stride, Vec{_mm512_castsi512_ps(lanes[r])} + bias, count);
}

// The last, partial step of k of a weight tile, zero behind the end.
inline void copy_last_step(const bf16_t* w, int64_t stride, int rows, int64_t width, char* out) {
  for (int n = 0; n < rows; n++) _mm512_store_si512(out + n * 64, _mm512_maskz_loadu_epi16(elements_mask(width), w + n * stride));
}

// 16 x WEIGHTS weight rows against 16 x ROWS rows of x. `ahead` is the distance, in bytes, to weights that come soon; or 0.
template <int WEIGHTS, int ROWS>
inline void amx_tile(const bf16_t* w, int64_t w_stride, const int* counts, int64_t K, const char* x, int64_t ahead,
                     float (*sums)[256]) {
  const int64_t bytes = w_stride * int64_t{sizeof(bf16_t)}, next_tile = tile_steps(K) * kTileBytes;
  const bf16_t* w1 = w + kTile * w_stride;
  _tile_zero(0);
  if constexpr (ROWS > 1) _tile_zero(1);
  if constexpr (WEIGHTS > 1) _tile_zero(2);
  if constexpr (WEIGHTS > 1 && ROWS > 1) _tile_zero(3);
  auto multiply = [&] {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (ROWS > 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (WEIGHTS > 1) _tile_dpbf16ps(2, 5, 6);
    if constexpr (WEIGHTS > 1 && ROWS > 1) _tile_dpbf16ps(3, 5, 7);
  };
  int64_t k = 0;
  for (; k + kTileStep <= K; k += kTileStep, x += kTileBytes) {
    if (ahead != 0)
      for (int64_t n = 0; n < WEIGHTS * kTile; n++)
        __builtin_prefetch(reinterpret_cast<const char*>(w + k) + n * bytes + ahead, 0, 2);
    _tile_loadd(6, x, 64);
    if constexpr (ROWS > 1) _tile_loadd(7, x + next_tile, 64);
    _tile_loadd(4, w + k, bytes);
    if constexpr (WEIGHTS > 1) _tile_loadd(5, w1 + k, bytes);
    multiply();
  }
  if (k < K) {
    alignas(64) char last[2][kTileBytes];
    copy_last_step(w + k, w_stride, counts[0], K - k, last[0]);
    if constexpr (WEIGHTS > 1) copy_last_step(w1 + k, w_stride, counts[1], K - k, last[1]);
    asm volatile("" : : "r"(last) : "memory");
    _tile_loadd(6, x, 64);
    if constexpr (ROWS > 1) _tile_loadd(7, x + next_tile, 64);
    _tile_loadd(4, last[0], 64);
    if constexpr (WEIGHTS > 1) _tile_loadd(5, last[1], 64);
    multiply();
  }
  _tile_stored(0, sums[0], 64);
  if constexpr (ROWS > 1) _tile_stored(1, sums[1], 64);
  if constexpr (WEIGHTS > 1) _tile_stored(2, sums[2], 64);
  if constexpr (WEIGHTS > 1 && ROWS > 1) _tile_stored(3, sums[3], 64);
}

inline int64_t amx_block_rows(int64_t K) {
  const int64_t tiles = kAmxBlockBytes / (tile_steps(K) * kTileBytes);
  return (tiles < 2 ? 2 : tiles / 2 * 2) * kTile;
}

template <class Y>
void amx_item(const LinearArgs& a, int64_t first_row, int64_t end_row, int64_t column, const int* counts) {
  alignas(64) float sums[4][256];
  const bf16_t* w = static_cast<const bf16_t*>(a.weight) + column * a.weight_stride;
  const char* x = static_cast<const char*>(a.scratch);
  const bool more = column + 2 * kAmxPanel <= a.N;
  for (int64_t row = first_row; row < end_row; row += 2 * kTile) {
    const char* packed = x + row / kTile * tile_steps(a.K) * kTileBytes;
    const int64_t ahead = more && row == first_row ? kAmxPanel * a.weight_stride * int64_t{sizeof(bf16_t)} : 0;
    const bool two_rows = end_row - row > kTile;
    if (counts[1] > 0)
      two_rows ? amx_tile<2, 2>(w, a.weight_stride, counts, a.K, packed, ahead, sums)
               : amx_tile<2, 1>(w, a.weight_stride, counts, a.K, packed, ahead, sums);
    else
      two_rows ? amx_tile<1, 2>(w, a.weight_stride, counts, a.K, packed, ahead, sums)
               : amx_tile<1, 1>(w, a.weight_stride, counts, a.K, packed, ahead, sums);
    for (int64_t r = row; r < end_row && r < row + 2 * kTile; r += kTile)
      for (int64_t n = 0; n < 2 && counts[n] > 0; n++)
        store_outputs(a, sums[n * 2 + (r - row) / kTile], counts[n], end_row - r < kTile ? end_row - r : kTile,
                      column + n * kTile, static_cast<Y*>(a.y) + r * a.y_stride + column + n * kTile);
  }
}

int64_t amx_items(const LinearArgs& a) {
  const int64_t block = amx_block_rows(a.K);
  return (a.M + block - 1) / block * ((a.N + kAmxPanel - 1) / kAmxPanel);
}

void amx_linear(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t panels = (a.N + kAmxPanel - 1) / kAmxPanel, block = amx_block_rows(a.K);
  int configured[2] = {-1, -1};
  for (int64_t i = begin; i < end; i++) {
    const int64_t first_row = i / panels * block, column = i % panels * kAmxPanel, left = a.N - column;
    const int counts[2] = {static_cast<int>(left < kTile ? left : kTile),
                           static_cast<int>(left < kTile ? 0 : left < kAmxPanel ? left - kTile : kTile)};
    if (counts[0] != configured[0] || counts[1] != configured[1])
      configure_tiles(configured[0] = counts[0], configured[1] = counts[1]);
    const int64_t end_row = first_row + block < a.M ? first_row + block : a.M;
    a.y_dtype == Dtype::kFloat32 ? amx_item<float>(a, first_row, end_row, column, counts)
                                 : amx_item<bf16_t>(a, first_row, end_row, column, counts);
  }
  _tile_release();
}

// The functions of the table: bf16 by bf16 here, everything else as on plain AVX-512.
int64_t linear_scratch(const LinearArgs& a) { return meets_on_amx(a) ? amx_scratch(a) : kAvx512Kernels.linear_scratch(a); }
int64_t linear_items(const LinearArgs& a) { return meets_on_amx(a) ? amx_items(a) : kAvx512Kernels.linear_items(a); }
void linear_pack(const LinearArgs& a, int64_t begin, int64_t end) {
  meets_on_amx(a) ? amx_pack(a, begin, end) : kAvx512Kernels.linear_pack(a, begin, end);
}
void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  meets_on_amx(a) ? amx_linear(a, begin, end) : kAvx512Kernels.linear(a, begin, end);
}

// A level of vectors with these products in it.
KernelTable table_with_amx(const char* name, const KernelTable& vectors) {
  KernelTable table = vectors;
  table.name = name;
  table.linear_packed_bytes = kAvx512Kernels.linear_packed_bytes;  // tiles read the weights where they lie
  table.linear_pack_weight = kAvx512Kernels.linear_pack_weight;
  table.linear_scratch = linear_scratch, table.linear_pack = linear_pack;
  table.linear_items = linear_items, table.linear = linear;
  return table;
}

}  // namespace
