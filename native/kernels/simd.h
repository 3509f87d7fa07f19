// The vector type of an ISA level, and the 16-lane vector that every level builds from it.
//
// Compiled once per level inside namespace TENFOLD_LEVEL. All levels do the same IEEE operations on the same lanes in
// the same order, so results are bit-identical across levels; only how many lanes fit a register differs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

#if defined(TENFOLD_AVX512) || defined(TENFOLD_AVX2)
#include <immintrin.h>
#endif

namespace tenfold::TENFOLD_LEVEL {

#define TENFOLD_INLINE inline __attribute__((always_inline))
#define TENFOLD_LAMBDA __attribute__((always_inline))
// For loops over the rows of a tile: unrolled, their sums live in registers.
#define TENFOLD_UNROLL _Pragma("GCC unroll 16")

#if defined(TENFOLD_AVX512)

constexpr int kLanes = 16;
using VF = __m512;
using VI = __m512i;

TENFOLD_INLINE VF set1(float x) { return _mm512_set1_ps(x); }
TENFOLD_INLINE VI set1i(int32_t x) { return _mm512_set1_epi32(x); }
TENFOLD_INLINE VF load(const float* p) { return _mm512_loadu_ps(p); }
TENFOLD_INLINE void store(float* p, VF v) { _mm512_storeu_ps(p, v); }
TENFOLD_INLINE void storei(int32_t* p, VI v) { _mm512_storeu_si512(p, v); }
TENFOLD_INLINE VF add(VF a, VF b) { return _mm512_add_ps(a, b); }
TENFOLD_INLINE VF sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
TENFOLD_INLINE VF mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
TENFOLD_INLINE VF div(VF a, VF b) { return _mm512_div_ps(a, b); }
TENFOLD_INLINE VF fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
TENFOLD_INLINE VF max(VF a, VF b) { return _mm512_max_ps(a, b); }
TENFOLD_INLINE VF min(VF a, VF b) { return _mm512_min_ps(a, b); }
TENFOLD_INLINE VF to_float(VI a) { return _mm512_cvtepi32_ps(a); }
TENFOLD_INLINE VI to_int(VF a) { return _mm512_cvtps_epi32(a); }  // nearest even
TENFOLD_INLINE VI as_int(VF a) { return _mm512_castps_si512(a); }
TENFOLD_INLINE VF as_float(VI a) { return _mm512_castsi512_ps(a); }
TENFOLD_INLINE VI addi(VI a, VI b) { return _mm512_add_epi32(a, b); }
TENFOLD_INLINE VI subi(VI a, VI b) { return _mm512_sub_epi32(a, b); }
TENFOLD_INLINE VI andi(VI a, VI b) { return _mm512_and_si512(a, b); }
template <int N>
TENFOLD_INLINE VI shl(VI a) {
  return _mm512_slli_epi32(a, N);
}
template <int N>
TENFOLD_INLINE VI shr(VI a) {
  return _mm512_srli_epi32(a, N);
}
// a < b ? x : y, false for NaN
TENFOLD_INLINE VF select_lt(VF a, VF b, VF x, VF y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
TENFOLD_INLINE VF load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
TENFOLD_INLINE VF load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
TENFOLD_INLINE VI loadi(const void* p) { return _mm512_loadu_si512(p); }

#elif defined(TENFOLD_AVX2)

constexpr int kLanes = 8;
using VF = __m256;
using VI = __m256i;

TENFOLD_INLINE VF set1(float x) { return _mm256_set1_ps(x); }
TENFOLD_INLINE VI set1i(int32_t x) { return _mm256_set1_epi32(x); }
TENFOLD_INLINE VF load(const float* p) { return _mm256_loadu_ps(p); }
TENFOLD_INLINE void store(float* p, VF v) { _mm256_storeu_ps(p, v); }
TENFOLD_INLINE void storei(int32_t* p, VI v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
TENFOLD_INLINE VF add(VF a, VF b) { return _mm256_add_ps(a, b); }
TENFOLD_INLINE VF sub(VF a, VF b) { return _mm256_sub_ps(a, b); }
TENFOLD_INLINE VF mul(VF a, VF b) { return _mm256_mul_ps(a, b); }
TENFOLD_INLINE VF div(VF a, VF b) { return _mm256_div_ps(a, b); }
TENFOLD_INLINE VF fma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
TENFOLD_INLINE VF max(VF a, VF b) { return _mm256_max_ps(a, b); }
TENFOLD_INLINE VF min(VF a, VF b) { return _mm256_min_ps(a, b); }
TENFOLD_INLINE VF to_float(VI a) { return _mm256_cvtepi32_ps(a); }
TENFOLD_INLINE VI to_int(VF a) { return _mm256_cvtps_epi32(a); }
TENFOLD_INLINE VI as_int(VF a) { return _mm256_castps_si256(a); }
TENFOLD_INLINE VF as_float(VI a) { return _mm256_castsi256_ps(a); }
TENFOLD_INLINE VI addi(VI a, VI b) { return _mm256_add_epi32(a, b); }
TENFOLD_INLINE VI subi(VI a, VI b) { return _mm256_sub_epi32(a, b); }
TENFOLD_INLINE VI andi(VI a, VI b) { return _mm256_and_si256(a, b); }
template <int N>
TENFOLD_INLINE VI shl(VI a) {
  return _mm256_slli_epi32(a, N);
}
template <int N>
TENFOLD_INLINE VI shr(VI a) {
  return _mm256_srli_epi32(a, N);
}
TENFOLD_INLINE VF select_lt(VF a, VF b, VF x, VF y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
TENFOLD_INLINE VF load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
TENFOLD_INLINE VF load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
TENFOLD_INLINE VI loadi(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

#else  // portable: the compiler's own vectors, whatever the machine has

constexpr int kLanes = 4;
typedef float VF __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));

TENFOLD_INLINE VF set1(float x) { return VF{x, x, x, x}; }
TENFOLD_INLINE VI set1i(int32_t x) { return VI{x, x, x, x}; }
TENFOLD_INLINE VF load(const float* p) {
  VF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
TENFOLD_INLINE void store(float* p, VF v) { std::memcpy(p, &v, sizeof v); }
TENFOLD_INLINE void storei(int32_t* p, VI v) { std::memcpy(p, &v, sizeof v); }
TENFOLD_INLINE VF add(VF a, VF b) { return a + b; }
TENFOLD_INLINE VF sub(VF a, VF b) { return a - b; }
TENFOLD_INLINE VF mul(VF a, VF b) { return a * b; }
TENFOLD_INLINE VF div(VF a, VF b) { return a / b; }
TENFOLD_INLINE VF fma(VF a, VF b, VF c) {
  return VF{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
            __builtin_fmaf(a[3], b[3], c[3])};
}
TENFOLD_INLINE VF max(VF a, VF b) { return a > b ? a : b; }
TENFOLD_INLINE VF min(VF a, VF b) { return a < b ? a : b; }
TENFOLD_INLINE VF to_float(VI a) { return __builtin_convertvector(a, VF); }
TENFOLD_INLINE VI to_int(VF a) {
  // 1.5 * 2^23 moves the rounding to the last bit; callers stay within +-2^22. 0 for NaN.
  const VF magic = set1(12582912.0f);
  const VF shifted = a + magic;
  VI bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return (bits - set1i(0x4B400000)) & (a == a);
}
TENFOLD_INLINE VI as_int(VF a) {
  VI v;
  std::memcpy(&v, &a, sizeof v);
  return v;
}
TENFOLD_INLINE VF as_float(VI a) {
  VF v;
  std::memcpy(&v, &a, sizeof v);
  return v;
}
TENFOLD_INLINE VI addi(VI a, VI b) { return a + b; }
TENFOLD_INLINE VI subi(VI a, VI b) { return a - b; }
TENFOLD_INLINE VI andi(VI a, VI b) { return a & b; }
template <int N>
TENFOLD_INLINE VI shl(VI a) {
  typedef uint32_t VU __attribute__((vector_size(16)));
  return VI(VU(a) << N);
}
template <int N>
TENFOLD_INLINE VI shr(VI a) {
  typedef uint32_t VU __attribute__((vector_size(16)));
  return VI(VU(a) >> N);
}
TENFOLD_INLINE VF select_lt(VF a, VF b, VF x, VF y) { return a < b ? x : y; }
TENFOLD_INLINE VF load_f16(const uint16_t* p) {
  return VF{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
TENFOLD_INLINE VF load_bf16(const uint16_t* p) {
  VI v = {p[0], p[1], p[2], p[3]};
  return as_float(shl<16>(v));
}
TENFOLD_INLINE VI loadi(const void* p) {
  VI v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

#endif

TENFOLD_INLINE VI load_int8(const int8_t* p) {
#if defined(TENFOLD_AVX512)
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(TENFOLD_AVX2)
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return VI{p[0], p[1], p[2], p[3]};
#endif
}

constexpr int kParts = 16 / kLanes;

// Sixteen lanes.
struct V16 {
  VF part[kParts];
};

template <class F>
TENFOLD_INLINE V16 each(F f) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.part[i] = f(i);
  return r;
}
TENFOLD_INLINE V16 set16(float x) {
  return each([&](int) { return set1(x); });
}
TENFOLD_INLINE V16 load16(const float* p) {
  return each([&](int i) { return load(p + i * kLanes); });
}
TENFOLD_INLINE void store16(float* p, const V16& v) {
  for (int i = 0; i < kParts; ++i) store(p + i * kLanes, v.part[i]);
}
TENFOLD_INLINE V16 add16(const V16& a, const V16& b) {
  return each([&](int i) { return add(a.part[i], b.part[i]); });
}
TENFOLD_INLINE V16 mul16(const V16& a, const V16& b) {
  return each([&](int i) { return mul(a.part[i], b.part[i]); });
}
TENFOLD_INLINE V16 fma16(const V16& a, const V16& b, const V16& c) {
  return each([&](int i) { return fma(a.part[i], b.part[i], c.part[i]); });
}
TENFOLD_INLINE V16 max16(const V16& a, const V16& b) {
  return each([&](int i) { return max(a.part[i], b.part[i]); });
}
// Lanes are folded in halves, 8, 4, 2, 1: the same order at every level.
#if defined(TENFOLD_AVX512) || defined(TENFOLD_AVX2)
TENFOLD_INLINE __m256 fold8(const V16& v, __m256 (*op)(__m256, __m256)) {
#if defined(TENFOLD_AVX512)
  return op(_mm512_castps512_ps256(v.part[0]), _mm512_extractf32x8_ps(v.part[0], 1));
#else
  return op(v.part[0], v.part[1]);
#endif
}
TENFOLD_INLINE float sum_lanes(const V16& v) {
  const __m256 a = fold8(v, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); });
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
TENFOLD_INLINE float max_lanes(const V16& v) {
  const __m256 a = fold8(v, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); });
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
#else
template <class Op>
TENFOLD_INLINE float fold_lanes(const V16& v, Op op) {
  float t[16];
  store16(t, v);
  for (int h = 8; h > 0; h >>= 1)
    for (int i = 0; i < h; ++i) t[i] = op(t[i], t[i + h]);
  return t[0];
}
TENFOLD_INLINE float sum_lanes(const V16& v) {
  return fold_lanes(v, [](float a, float b) { return a + b; });
}
TENFOLD_INLINE float max_lanes(const V16& v) {
  return fold_lanes(v, [](float a, float b) { return a > b ? a : b; });
}
#endif

// The low byte of each lane, of values within int8.
TENFOLD_INLINE void store_bytes(int8_t* p, VI v) {
#if defined(TENFOLD_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
#elif defined(TENFOLD_AVX2)
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(v[i]);
#endif
}
TENFOLD_INLINE int32_t sum_bytes16(const int8_t* p) {
#if defined(TENFOLD_AVX512) || defined(TENFOLD_AVX2)
  // Biased to unsigned, since the sum of absolute differences is: two sums of 8.
  const __m128i v = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
  const __m128i s = _mm_sad_epu8(v, _mm_setzero_si128());
  return _mm_cvtsi128_si32(s) + _mm_extract_epi32(s, 2) - 16 * 128;
#else
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += p[i];
  return sum;
#endif
}

// e^x by range reduction to |r| <= ln2/2 and a polynomial of degree 6 (Taylor, below 1 ulp there); 0 below -87,
// saturates above 88. exp(0) is exactly 1, which makes a fully masked page a no-op. NaN stays NaN: max and min return
// their second operand then.
TENFOLD_INLINE VF exp_lane(VF x) {
  const VF low = set1(-87.0f);
  const VF clamped = min(set1(88.0f), max(low, x));
  const VI n = to_int(mul(clamped, set1(1.44269504088896341f)));
  const VF nf = to_float(n);
  VF r = fma(nf, set1(-0.693359375f), clamped);
  r = fma(nf, set1(2.12194440e-4f), r);
  VF p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  const VF scaled = as_float(addi(as_int(p), shl<23>(n)));
  return select_lt(x, low, set1(0.0f), scaled);
}
TENFOLD_INLINE V16 exp16(const V16& x) {
  return each([&](int i) { return exp_lane(x.part[i]); });
}

// Natural logarithm of a positive normal float: mantissa in [sqrt(1/2), sqrt(2)), then 2 atanh((m-1)/(m+1)).
TENFOLD_INLINE VF log_lane(VF x) {
  const VI bits = as_int(x);
  const VI shifted = subi(bits, set1i(0x3F3504F3));  // bits of sqrt(1/2)
  const VI e = subi(shr<23>(addi(shifted, set1i(0x3F800000))), set1i(127));
  const VF m = as_float(subi(bits, shl<23>(e)));
  const VF s = div(sub(m, set1(1.0f)), add(m, set1(1.0f)));
  const VF s2 = mul(s, s);
  VF p = set1(2.0f / 11);
  p = fma(p, s2, set1(2.0f / 9));
  p = fma(p, s2, set1(2.0f / 7));
  p = fma(p, s2, set1(2.0f / 5));
  p = fma(p, s2, set1(2.0f / 3));
  p = mul(mul(p, s2), s);
  const VF ef = to_float(e);
  // Small terms first, so that log(1) is exactly 0 and the sum keeps its bits.
  VF r = fma(ef, set1(-2.12194440e-4f), p);
  r = add(r, add(s, s));
  return fma(ef, set1(0.693359375f), r);
}

}  // namespace tenfold::TENFOLD_LEVEL
