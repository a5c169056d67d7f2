// A model of the AMX tile instructions in plain C++, under the names of their intrinsics: the kernels of linear_amx.inl run on
// it wherever there is AVX-512, so that they are tested without the hardware.
//
// Strict where the hardware is: a tile that is not configured or a product of tiles whose shapes do not fit stops the program,
// and no byte outside the configured shape is read or written. The arithmetic is that of Intel's manual: fused sums of the even
// and of the odd products of a row, in ascending order, added to the accumulator at the end; denormals are zero.
#pragma once
#include <cstdint>

namespace {

struct EmulatedTiles {
  bool configured;
  int rows[8], bytes[8];  // shape of each tile, bytes per row
  unsigned char data[8][16][64];
};
thread_local EmulatedTiles emulated_tiles;

inline void require_tile(bool valid) {
  if (!valid) __builtin_trap();  // #UD on the hardware
}

inline void emulated_loadconfig(const void* config) {
  EmulatedTiles& s = emulated_tiles;
  unsigned char bytes[64];
  __builtin_memcpy(bytes, config, sizeof bytes);
  require_tile(bytes[0] == 1 && bytes[1] == 0);
  for (int t = 0; t < 8; t++) {
    uint16_t width;
    __builtin_memcpy(&width, bytes + 16 + 2 * t, sizeof width);
    s.bytes[t] = width, s.rows[t] = bytes[48 + t];
    require_tile(s.bytes[t] <= 64 && s.rows[t] <= 16 && (s.bytes[t] == 0) == (s.rows[t] == 0));
  }
  __builtin_memset(s.data, 0, sizeof s.data);
  s.configured = true;
}

inline void emulated_release() { emulated_tiles.configured = false; }

inline void require_configured(int tile) { require_tile(emulated_tiles.configured && emulated_tiles.rows[tile] > 0); }

inline void emulated_zero(int tile) {
  require_configured(tile);
  __builtin_memset(emulated_tiles.data[tile], 0, sizeof emulated_tiles.data[tile]);
}

inline void emulated_loadd(int tile, const void* base, int64_t stride) {
  emulated_zero(tile);
  for (int r = 0; r < emulated_tiles.rows[tile]; r++)
    __builtin_memcpy(emulated_tiles.data[tile][r], static_cast<const char*>(base) + r * stride, emulated_tiles.bytes[tile]);
}

inline void emulated_stored(int tile, void* base, int64_t stride) {
  require_configured(tile);
  for (int r = 0; r < emulated_tiles.rows[tile]; r++)
    __builtin_memcpy(static_cast<char*>(base) + r * stride, emulated_tiles.data[tile][r], emulated_tiles.bytes[tile]);
}

inline float flushed(float x) { return __builtin_fabsf(x) < 1.17549435e-38f ? __builtin_copysignf(0.0f, x) : x; }

// Element 2 * pair + odd of row r of a bf16 tile.
inline float emulated_element(const unsigned char (*tile)[64], int r, int at) {
  uint16_t bits;
  __builtin_memcpy(&bits, tile[r] + 2 * at, sizeof bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, sizeof value);
  return flushed(value);
}

inline void emulated_dpbf16ps(int sum, int a, int b) {
  EmulatedTiles& s = emulated_tiles;
  require_configured(sum), require_configured(a), require_configured(b);
  require_tile(s.rows[sum] == s.rows[a] && s.bytes[sum] == s.bytes[b] && s.bytes[a] == 4 * s.rows[b]);
  for (int m = 0; m < s.rows[sum]; m++) {
    float even[16] = {}, odd[16] = {};
    for (int pair = 0; pair < s.rows[b]; pair++)
      for (int n = 0; n < s.bytes[sum] / 4; n++) {
        even[n] = flushed(__builtin_fmaf(emulated_element(s.data[a], m, 2 * pair), emulated_element(s.data[b], pair, 2 * n), even[n]));
        odd[n] =
            flushed(__builtin_fmaf(emulated_element(s.data[a], m, 2 * pair + 1), emulated_element(s.data[b], pair, 2 * n + 1), odd[n]));
      }
    for (int n = 0; n < s.bytes[sum] / 4; n++) {
      float old;
      __builtin_memcpy(&old, s.data[sum][m] + 4 * n, sizeof old);
      const float total = flushed(flushed(old) + flushed(even[n] + odd[n]));
      __builtin_memcpy(s.data[sum][m] + 4 * n, &total, sizeof total);
    }
  }
}

}  // namespace

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
