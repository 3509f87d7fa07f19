// IEEE half to float, exactly, without hardware support.
#pragma once

#include <cstdint>
#include <cstring>

namespace tenfold {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u;
  const uint32_t mantissa = h & 1023u;
  float out;
  if (exponent == 0) {
    out = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -out : out;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | (mantissa << 13);
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

}  // namespace tenfold
