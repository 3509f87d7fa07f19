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

// Four lanes at every level: what four stretches, or four vectors, have one of each.
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

// The highest lane of each of four vectors.
TENFOLD_INLINE F4 max_lanes4(const V16 (&v)[4]) {
#if defined(TENFOLD_AVX512) || defined(TENFOLD_AVX2)
  // Folded in pairs within the halves of a vector of 8, then the halves are.
  const auto larger = [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); };
  const auto pair = [&](int n) {
    const __m256 a = fold8(v[n], larger), b = fold8(v[n + 1], larger);
    return _mm256_castps_pd(_mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
  };
  const __m256d a = pair(0), b = pair(2);
  const __m256 all =
      _mm256_max_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  return _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
#else
  return F4{max_lanes(v[0]), max_lanes(v[1]), max_lanes(v[2]), max_lanes(v[3])};
#endif
}

// Bit n: lane n is not 0; lanes are 0 or -1.
TENFOLD_INLINE unsigned lanes_set(I4 v) {
#if defined(TENFOLD_AVX512) || defined(TENFOLD_AVX2)
  return static_cast<unsigned>(_mm_movemask_ps(reinterpret_cast<__m128>(v)));
#else
  return (v[0] & 1u) | (v[1] & 2u) | (v[2] & 4u) | (v[3] & 8u);
#endif
}

// Writes lane n of the four vectors, side by side, to to + n * pitch.
TENFOLD_INLINE void store_lanes(F4 a, F4 b, F4 c, F4 d, int count, uint8_t* to, size_t pitch) {
#if defined(TENFOLD_AVX512) || defined(TENFOLD_AVX2)
  _MM_TRANSPOSE4_PS(a, b, c, d);
  const F4 lanes[4] = {a, b, c, d};
#else
  const F4 lanes[4] = {
      {a[0], b[0], c[0], d[0]}, {a[1], b[1], c[1], d[1]}, {a[2], b[2], c[2], d[2]}, {a[3], b[3], c[3], d[3]}};
#endif
  for (int n = 0; n < count; ++n) std::memcpy(to + static_cast<size_t>(n) * pitch, &lanes[n], 16);
}

// 32 numbers within int8, as bytes.
#if defined(TENFOLD_AVX512) || defined(TENFOLD_AVX2)
using Bytes32 = __m256i;
TENFOLD_INLINE Bytes32 pack_bytes(const VI (&v)[2 * kParts]) {
#if defined(TENFOLD_AVX512)
  // Packing interleaves the two by quads.
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  return _mm512_cvtepi16_epi8(_mm512_permutexvar_epi64(order, _mm512_packs_epi32(v[0], v[1])));
#else
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i words = _mm256_packs_epi32(v[0], v[1]), more = _mm256_packs_epi32(v[2], v[3]);
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words, more), order);
#endif
}
TENFOLD_INLINE void store_bytes32(int8_t* p, Bytes32 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
// Bit q: quad q has a byte that is not 0.
TENFOLD_INLINE uint32_t quads_set(Bytes32 v) {
  const __m256i none = _mm256_cmpeq_epi32(v, _mm256_setzero_si256());
  return ~static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(none))) & 0xFFu;
}
// halves[h]: lane n is the sum of half h of v[n].
TENFOLD_INLINE void sum_halves(const Bytes32 (&v)[4], I4 (&halves)[2]) {
  __m256i sum[4];
  for (int n = 0; n < 4; ++n)
    sum[n] = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), v[n]), _mm256_set1_epi16(1));
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]), _mm256_hadd_epi32(sum[2], sum[3]));
  halves[0] = reinterpret_cast<I4>(_mm256_castsi256_si128(all));
  halves[1] = reinterpret_cast<I4>(_mm256_extracti128_si256(all, 1));
}
#else
struct Bytes32 {
  int8_t byte[32];
};
TENFOLD_INLINE Bytes32 pack_bytes(const VI (&v)[2 * kParts]) {
  Bytes32 r;
  for (int i = 0; i < 32; ++i) r.byte[i] = static_cast<int8_t>(v[i / kLanes][i % kLanes]);
  return r;
}
TENFOLD_INLINE void store_bytes32(int8_t* p, const Bytes32& v) { std::memcpy(p, v.byte, 32); }
TENFOLD_INLINE uint32_t quads_set(const Bytes32& v) {
  uint32_t set = 0;
  for (int i = 0; i < 32; ++i) set |= static_cast<uint32_t>(v.byte[i] != 0) << (i / 4);
  return set;
}
TENFOLD_INLINE void sum_halves(const Bytes32 (&v)[4], I4 (&halves)[2]) {
  const auto sum = [](const int8_t* bytes) {
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) total += bytes[i];
    return total;
  };
  for (int h = 0; h < 2; ++h)
    halves[h] = I4{sum(v[0].byte + h * 16), sum(v[1].byte + h * 16), sum(v[2].byte + h * 16), sum(v[3].byte + h * 16)};
}
#endif

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
