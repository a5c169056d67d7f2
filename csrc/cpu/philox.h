// Keyed noise: the numbers of sagc_fast/rollout/noise.py (Philox4x32-10, Salmon et al., SC 2011), bit for bit.
#pragma once

#include <cstdint>

namespace sagc {

// In [0, 1) with 53 random bits: the seed is the key; prompt id, sample index and position fill the counter.
inline double keyed_uniform(uint64_t seed, uint64_t prompt_id, uint32_t sample_index, uint32_t position) {
  uint32_t word[4] = {static_cast<uint32_t>(prompt_id), static_cast<uint32_t>(prompt_id >> 32), sample_index, position};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t first = uint64_t{0xD2511F53} * word[0], second = uint64_t{0xCD9E8D57} * word[2];
    word[0] = static_cast<uint32_t>(second >> 32) ^ word[1] ^ key[0];
    word[1] = static_cast<uint32_t>(second);
    word[2] = static_cast<uint32_t>(first >> 32) ^ word[3] ^ key[1];
    word[3] = static_cast<uint32_t>(first);
    key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
  }
  return static_cast<double>((static_cast<uint64_t>(word[0] >> 5) << 26) | (word[1] >> 6)) * 0x1p-53;
}

}  // namespace sagc
