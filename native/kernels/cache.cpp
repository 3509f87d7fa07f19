// Writing K and V of a row into a page, in the format that pages have.
#include "cache.h"

#include <type_traits>

#include "simd.h"

namespace tenfold::TENFOLD_LEVEL {
namespace {

constexpr int kMostElements = 512;

TENFOLD_INLINE VI to_bf16(VF x) {  // nearest even; NaN stays NaN
  const VI bits = as_int(x), high = shr<16>(bits), odd = andi(high, set1i(1));
  const VF rounded = as_float(shr<16>(addi(bits, addi(odd, set1i(0x7FFF)))));
  const VF quiet = as_float(addi(subi(high, andi(high, set1i(64))), set1i(64)));
  // Every number is below 1 or above 0.
  return as_int(select_lt(x, set1(1.0f), rounded, select_lt(set1(0.0f), x, rounded, quiet)));
}

// The low 16 bits of each lane.
TENFOLD_INLINE void store_words(uint16_t* p, VI v) {
#if defined(TENFOLD_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v));
#elif defined(TENFOLD_AVX2)
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), words);
#else
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint16_t>(v[i]);
#endif
}

// The step between codes of a row of 127 levels a side; 1 for a row of zeros. A row with NaN or infinity gets NaN.
float scale_of(const float* x, int count) {
  V16 peak = set16(0.0f), broken = set16(0.0f);
  for (int i = 0; i < count; i += 16) {
    const V16 v = load16(x + i);
    peak = max16(peak, max16(v, mul16(v, set16(-1.0f))));
    broken = fma16(v, set16(0.0f), broken);
  }
  if (!(sum_lanes(broken) == 0.0f)) return NAN;
  const float highest = max_lanes(peak);
  return highest > 1e-20f ? highest / 127.0f : 1.0f;
}

void narrow(const float* x, int count, uint16_t* out, float*) {
  for (int i = 0; i < count; i += kLanes) store_words(out + i, to_bf16(load(x + i)));
}

void narrow(const float* x, int count, int8_t* out, float* scale) {
  *scale = scale_of(x, count);
  if (!std::isfinite(*scale)) return static_cast<void>(std::memset(out, 0, static_cast<size_t>(count)));
  const VF step = set1(*scale), most = set1(127.0f), least = set1(-127.0f);
  for (int i = 0; i < count; i += kLanes) store_bytes(out + i, to_int(max(min(div(load(x + i), step), most), least)));
}

void narrow(const float* x, int count, float* out, float*) {
  std::memcpy(out, x, static_cast<size_t>(count) * sizeof(float));
}

template <class E>
void store_line(const KvLine& to, const float* k, const float* v, int dim) {
  alignas(64) E column[kMostElements];
  narrow(k, dim, column, to.key_scale);
  E* keys = reinterpret_cast<E*>(to.keys) + to.line;
  for (int d = 0; d < dim; ++d) keys[d * kPageRows] = column[d];
  narrow(v, dim, reinterpret_cast<E*>(to.values) + to.line * dim, to.value_scale);
}

}  // namespace

void store_kv(KvFormat format, const KvLine& to, const float* k, const float* v, int dim) {
  switch (format) {
    case KvFormat::BF16:
      return store_line<uint16_t>(to, k, v, dim);
    case KvFormat::F32:
      return store_line<float>(to, k, v, dim);
    case KvFormat::Q8:
      return store_line<int8_t>(to, k, v, dim);
  }
}

}  // namespace tenfold::TENFOLD_LEVEL
