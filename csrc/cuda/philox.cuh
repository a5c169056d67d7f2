// Keyed noise: Philox4x32-10 (Salmon et al., SC 2011), the numbers of sagc_fast/rollout/noise.py.
#pragma once

#include <cstdint>

namespace sagc {

// In [0, 1) with 53 random bits. The key is the seed, the counter (prompt id low, high, sample index, position).
__device__ __forceinline__ double philox_uniform(int64_t seed, int64_t prompt_id, int64_t sample_index, int64_t position) {
  uint32_t key_0 = static_cast<uint32_t>(seed), key_1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  uint32_t word_0 = static_cast<uint32_t>(prompt_id);
  uint32_t word_1 = static_cast<uint32_t>(static_cast<uint64_t>(prompt_id) >> 32);
  uint32_t word_2 = static_cast<uint32_t>(sample_index), word_3 = static_cast<uint32_t>(position);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t product_0 = static_cast<uint64_t>(word_0) * 0xD2511F53u;
    const uint64_t product_2 = static_cast<uint64_t>(word_2) * 0xCD9E8D57u;
    word_0 = static_cast<uint32_t>(product_2 >> 32) ^ word_1 ^ key_0;
    word_2 = static_cast<uint32_t>(product_0 >> 32) ^ word_3 ^ key_1;
    word_1 = static_cast<uint32_t>(product_2), word_3 = static_cast<uint32_t>(product_0);
    key_0 += 0x9E3779B9u, key_1 += 0xBB67AE85u;
  }
  const uint64_t bits = (static_cast<uint64_t>(word_0 >> 5) << 26) | (word_1 >> 6);
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace sagc
