// What happens to a row between the matrices. Widths are multiples of 16.
#include "elementwise.h"

#include "simd.h"

namespace tenfold::TENFOLD_LEVEL {

// Symmetric, 127 levels a side, one scale per 32 elements (the W4A8 recipe of llama.cpp's Q8 activations).
void quantize(const float* x, int cols, int8_t* codes, float* scale, int32_t* minus8, int32_t* minus128, float* sum,
              int32_t* minus128_half, float* sum_half) {
  for (int g = 0; g < cols / kActGroup; ++g) {
    const float* p = x + g * kActGroup;
    V16 peak = set16(0.0f);
    for (int h = 0; h < 2; ++h) {
      const V16 v = load16(p + h * 16);
      peak = max16(peak, max16(v, mul16(v, set16(-1.0f))));
    }
    const float largest = max_lanes(peak);
    const float s = largest / 127.0f;
    const VF inverse = set1(largest > 0.0f ? 127.0f / largest : 0.0f);
    alignas(64) int32_t rounded[kActGroup];
    for (int i = 0; i < kActGroup; i += kLanes) storei(rounded + i, to_int(mul(load(p + i), inverse)));
    int32_t half[2] = {0, 0};
    for (int h = 0; h < 2; ++h)
      for (int i = 0; i < 16; ++i) {
        codes[g * kActGroup + h * 16 + i] = static_cast<int8_t>(rounded[h * 16 + i]);
        half[h] += rounded[h * 16 + i];
      }
    const int32_t whole = half[0] + half[1];
    scale[g] = s;
    minus8[g] = -8 * whole;
    minus128[g] = -128 * whole;
    sum[g] = s * static_cast<float>(whole);
    for (int h = 0; h < 2; ++h) {
      minus128_half[2 * g + h] = -128 * half[h];
      sum_half[2 * g + h] = s * static_cast<float>(half[h]);
    }
  }
}

void rms_norm(const float* x, const float* weight, float offset, float eps, int width, float* out) {
  V16 squares = set16(0.0f);
  for (int i = 0; i < width; i += 16) {
    const V16 v = load16(x + i);
    squares = fma16(v, v, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(width);
  const V16 factor = set16(1.0f / std::sqrt(mean + eps));
  const V16 shift = set16(offset);
  for (int i = 0; i < width; i += 16)
    store16(out + i, mul16(mul16(load16(x + i), factor), add16(load16(weight + i), shift)));
}

void gate(Activation activation, const float* a, const float* b, int count, float* out) {
  // Both are x * sigmoid(u): silu with u = x, the tanh form of gelu with u = 2 sqrt(2/pi) (x + 0.044715 x^3).
  for (int i = 0; i < count; i += kLanes) {
    const VF x = load(a + i);
    VF u = x;
    if (activation == Activation::Gelu) {
      const VF x2 = mul(x, x);
      u = mul(mul(x, set1(1.5957691216057308f)), fma(x2, set1(0.044715f), set1(1.0f)));
    }
    const VF e = exp_lane(mul(u, set1(-1.0f)));
    store(out + i, mul(div(x, add(set1(1.0f), e)), load(b + i)));
  }
}

void rope(const float* x, const float* cosine, const float* sine, int rotary, int width, float scale, float* out) {
  const int half = rotary / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i] * scale, b = x[i + half] * scale;
    const float as = a * sine[i], bs = b * sine[i];
    out[i] = __builtin_fmaf(a, cosine[i], -bs);
    out[i + half] = __builtin_fmaf(b, cosine[i], as);
  }
  for (int i = rotary; i < width; ++i) out[i] = x[i] * scale;
}

void softcap(float* x, int count, float cap) {
  // tanh(u) = 1 - 2 / (1 + e^2u)
  for (int i = 0; i < count; i += kLanes) {
    const VF e = exp_lane(mul(load(x + i), set1(2.0f / cap)));
    const VF t = sub(set1(1.0f), div(set1(2.0f), add(set1(1.0f), e)));
    store(x + i, mul(set1(cap), t));
  }
}

}  // namespace tenfold::TENFOLD_LEVEL
