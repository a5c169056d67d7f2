// float16 to float32 in integers; see cuda_runtime.h.
#pragma once

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};

inline __half __ushort_as_half(uint16_t bits) { return {bits}; }

inline float __half2float(__half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, fraction = x.bits & 1023u;
  if (exponent == 31u) return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0u) return (sign != 0 ? -1.0f : 1.0f) * static_cast<float>(fraction) * 0x1p-24f;
  return __uint_as_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
}
