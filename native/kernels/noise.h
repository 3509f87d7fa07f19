// The noise that draws tokens: a pure function of seed, position and token (Philox4x32-10, Salmon et al., SC 2011), so
// that a draw does not depend on who else is in the step, and a drafter that knows the seed draws with the same noise.
#pragma once

#include <cstdint>

#include "simd.h"

namespace tenfold::TENFOLD_LEVEL {

// No noise is larger: that of the smallest number of 32 bits is 22.9.
constexpr float kMostNoise = 23.0f;

#if defined(TENFOLD_AVX512)
TENFOLD_INLINE VI xori(VI a, VI b) { return _mm512_xor_si512(a, b); }
#elif defined(TENFOLD_AVX2)
TENFOLD_INLINE VI xori(VI a, VI b) { return _mm256_xor_si256(a, b); }
#else
TENFOLD_INLINE VI xori(VI a, VI b) { return a ^ b; }
#endif

// The 64-bit products of each lane, unsigned, with a number: their high and their low halves.
TENFOLD_INLINE void multiply_wide(VI a, uint32_t b, VI& high, VI& low) {
#if defined(TENFOLD_AVX512)
  const VI factor = _mm512_set1_epi64(b);
  const VI even = _mm512_mul_epu32(a, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
  high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
#elif defined(TENFOLD_AVX2)
  const VI factor = _mm256_set1_epi64x(b);
  const VI even = _mm256_mul_epu32(a, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
#else
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(a[i])) * b;
    high[i] = static_cast<int32_t>(product >> 32);
    low[i] = static_cast<int32_t>(product);
  }
#endif
}

// The four words of each lane's block; a block makes the noise of 4 tokens.
TENFOLD_INLINE void philox(uint64_t seed, int64_t position, VI block, VI words[4]) {
  VI x0 = block, x1 = set1i(static_cast<int32_t>(position));
  VI x2 = set1i(static_cast<int32_t>(static_cast<uint64_t>(position) >> 32)), x3 = set1i(0);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    VI high_a, low_a, high_b, low_b;
    multiply_wide(x0, 0xD2511F53u, high_a, low_a);
    multiply_wide(x2, 0xCD9E8D57u, high_b, low_b);
    x0 = xori(xori(high_b, x1), set1i(static_cast<int32_t>(k0)));
    x1 = low_b;
    x2 = xori(xori(high_a, x3), set1i(static_cast<int32_t>(k1)));
    x3 = low_a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = x0;
  words[1] = x1;
  words[2] = x2;
  words[3] = x3;
}

// v = (word + 0.5) / 2^32 in float, at most 1 - 2^-24; -log(-log1p(-v)). Small v carry the large noise, where floats
// are dense: log1p by Kahan's correction log(w) * v / (1 - w), w = 1 - v.
TENFOLD_INLINE VF gumbel_lane(VI word) {
  // Unsigned to float, rounded once: both halves are exact.
  const VF whole = add(mul(to_float(shr<16>(word)), set1(65536.0f)), to_float(andi(word, set1i(0xFFFF))));
  const VF uniform = mul(add(whole, set1(0.5f)), set1(0x1p-32f));
  const VF v = min(uniform, set1(1.0f - 0x1p-24f));
  const VF w = sub(set1(1.0f), v);
  const VF spread = sub(set1(1.0f), w);
  const VF tiny = set1(0x1p-25f);
  const VF log_w = mul(log_lane(w), set1(-1.0f));
  const VF corrected = div(mul(log_w, v), max(spread, tiny));
  const VF exponential = select_lt(spread, tiny, v, corrected);
  return mul(log_lane(exponential), set1(-1.0f));
}

}  // namespace tenfold::TENFOLD_LEVEL
