// What happens to a row between the matrices. Widths are multiples of 16.
#include "elementwise.h"

#include "simd.h"

namespace tenfold::TENFOLD_LEVEL {

namespace {

// An element is an outlier if it exceeds this many times the row's root mean square. Measured on SmolLM2-135M over
// 4,096 positions (benchmarks/accuracy.py), mean KL and greedy agreement with exact activations, and speed of a
// prefill: 3: 0.00047, 98.7 %, 1.00; 4: 0.00063, 98.6 %, 1.04. With one plane alone it was 0.0036 and 95.9 %.
constexpr float kOutlier = 4.0f;
// Peaks below this count as zero, so that products of scales stay normal numbers.
constexpr float kSmallest = 1e-20f;

// A row with an infinity or NaN: its codes stand for NaN, so that what comes of it is NaN and not some number.
void quantize_broken(int cols, const QuantRows& to) {
  for (int g = 0; g < cols / kActGroup; ++g) {
    Stretch& a = to.stretch[static_cast<size_t>(g) * to.pitch];
    a = {};
    a.scale = a.sum = a.sum_half[0] = a.sum_half[1] = NAN;
  }
}

// codes[0..31] = whole[0..31]; returns the sums of both halves.
struct Halves {
  int32_t sum[2];
};
TENFOLD_INLINE Halves store_codes(const VI* whole, int8_t* codes) {
  for (int i = 0; i < 2 * kParts; ++i) store_bytes(codes + i * kLanes, whole[i]);
  return {{sum_bytes16(codes), sum_bytes16(codes + 16)}};
}

}  // namespace

// Symmetric, 127 levels a side, one scale per 32 elements, set by the largest that is no outlier (or by the outliers,
// where they would not fit 127 steps of 128 levels).
void quantize(const float* x, int cols, const QuantRows& to) {
  V16 even = set16(0.0f), odd = set16(0.0f);
  for (int i = 0; i < cols; i += kActGroup) {
    const V16 v = load16(x + i), w = load16(x + i + 16);
    even = fma16(v, v, even);
    odd = fma16(w, w, odd);
  }
  const float limit = sum_lanes(add16(even, odd)) / static_cast<float>(cols) * (kOutlier * kOutlier);
  if (!std::isfinite(limit))  // or only its square is too large
    for (int i = 0; i < cols; ++i)
      if (!std::isfinite(x[i])) return quantize_broken(cols, to);
  for (int g = 0; g < cols / kActGroup; ++g) {
    const float* p = x + g * kActGroup;
    V16 size[2];  // of the elements
    for (int h = 0; h < 2; ++h) {
      const V16 v = load16(p + h * 16);
      size[h] = max16(v, mul16(v, set16(-1.0f)));
    }
    const float largest = max_lanes(max16(size[0], size[1]));
    const float peak = largest > kSmallest ? largest : 0.0f;
    const bool split = peak * peak > limit;
    float most = peak;  // of those that set the scale
    if (split) {
      for (V16& s : size)
        s = each([&](int i) { return select_lt(set1(limit), mul(s.part[i], s.part[i]), set1(0.0f), s.part[i]); });
      most = max_lanes(max16(size[0], size[1]));
      const float least = peak * 0x1p-7f;
      if (!(most > least)) most = least;
    }
    const float scale = most / 127.0f;
    const VF inverse = set1(most > 0.0f ? 127.0f / most : 0.0f);
    Stretch& a = to.stretch[static_cast<size_t>(g) * to.pitch];
    VI whole[2 * kParts];
    for (int i = 0; i < 2 * kParts; ++i) whole[i] = to_int(mul(load(p + i * kLanes), inverse));
    Halves highs = {{0, 0}};
    a.outliers = 0;
    if (split) {
      HighStretch& high = to.high[static_cast<size_t>(g) * to.pitch];
      VI above[2 * kParts];
      for (int i = 0; i < 2 * kParts; ++i) {
        const VF w = to_float(whole[i]);
        const VF steps = to_float(to_int(mul(w, set1(0x1p-7f))));
        const VF taken = select_lt(mul(w, w), set1(127.5f * 127.5f), set1(0.0f), steps);
        above[i] = to_int(taken);
        whole[i] = subi(whole[i], shl<7>(above[i]));
      }
      highs = store_codes(above, high.codes);
      for (int q = 0; q < kActGroup / 4; ++q) {
        int32_t quad;
        std::memcpy(&quad, high.codes + q * 4, 4);
        a.outliers |= static_cast<uint32_t>(quad != 0) << q;
      }
    }
    const Halves lows = store_codes(whole, a.codes);
    const int32_t sum[2] = {lows.sum[0] + 128 * highs.sum[0], lows.sum[1] + 128 * highs.sum[1]};
    a.scale = scale;
    a.sum = scale * static_cast<float>(sum[0] + sum[1]);
    a.minus8 = -8 * (sum[0] + sum[1]);
    a.minus128 = -128 * (sum[0] + sum[1]);
    a.minus_half = -128 * sum[0];
    for (int h = 0; h < 2; ++h) a.sum_half[h] = scale * static_cast<float>(sum[h]);
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
  const VF factor = set1(scale);
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const VF a = mul(load(x + i), factor), b = mul(load(x + i + half), factor);
    const VF c = load(cosine + i), s = load(sine + i);
    store(out + i, fma(a, c, mul(mul(b, s), set1(-1.0f))));
    store(out + i + half, fma(b, c, mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = x[i] * scale, b = x[i + half] * scale;
    const float as = a * sine[i], bs = b * sine[i];
    out[i] = __builtin_fmaf(a, cosine[i], -bs);
    out[i + half] = __builtin_fmaf(b, cosine[i], as);
  }
  for (i = rotary; i < width; ++i) out[i] = x[i] * scale;
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
