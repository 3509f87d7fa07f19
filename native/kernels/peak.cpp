// Dot products of bytes out of registers and nothing else: the limit that prefill is held against.
#include "peak.h"

#include "simd.h"

namespace tenfold::TENFOLD_LEVEL {

// Enough independent sums to hide the latency of any multiplier.
constexpr int kSums = 12;

// Runs `rounds` of them, returns how many multiplications of two bytes that were. `result` must be used.
int64_t dot_products(int rounds, int32_t* result) {
  alignas(64) int32_t lanes[kLanes];
#if defined(TENFOLD_AVX512)
  VI sums[kSums];
  const VI a = set1i(*result | 0x01020304), b = set1i(*result | 0x03010201);
  for (int i = 0; i < kSums; ++i) sums[i] = set1i(i);
  for (int round = 0; round < rounds; ++round) TENFOLD_UNROLL
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
  for (int i = 1; i < kSums; ++i) sums[0] = addi(sums[0], sums[i]);
  storei(lanes, sums[0]);
#elif defined(TENFOLD_AVX2)
  VI sums[kSums];
  const VI a = set1i(*result | 0x01020304), ones = _mm256_set1_epi16(1);
  for (int i = 0; i < kSums; ++i) sums[i] = set1i(i);
  for (int round = 0; round < rounds; ++round) TENFOLD_UNROLL
  for (int i = 0; i < kSums; ++i)  // each on what it had, or the compiler would multiply once
    sums[i] = addi(sums[i], _mm256_madd_epi16(_mm256_maddubs_epi16(a, sums[i]), ones));
  for (int i = 1; i < kSums; ++i) sums[0] = addi(sums[0], sums[i]);
  storei(lanes, sums[0]);
#else
  VI sums[kSums];
  const VI a = set1i(*result | 3);
  for (int i = 0; i < kSums; ++i) sums[i] = set1i(i);
  for (int round = 0; round < rounds; ++round)
    for (int i = 0; i < kSums; ++i) sums[i] = addi(sums[i] & set1i(255), (sums[i] & set1i(127)) * a);
  for (int i = 1; i < kSums; ++i) sums[0] = addi(sums[0], sums[i]);
  storei(lanes, sums[0]);
#endif
  *result = lanes[0];
#if defined(TENFOLD_AVX512) || defined(TENFOLD_AVX2)
  constexpr int64_t kEach = kLanes * 4;
#else
  constexpr int64_t kEach = kLanes;
#endif
  return static_cast<int64_t>(rounds) * kSums * kEach;
}

}  // namespace tenfold::TENFOLD_LEVEL
