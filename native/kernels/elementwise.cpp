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

// What sets the scale of a stretch with outliers: the largest of the others, or the outliers, where they would not fit
// 127 steps of 128 levels.
float most_within(const float* x, float limit, float peak) {
  V16 size[2];
  for (int h = 0; h < 2; ++h) {
    const V16 v = load16(x + h * 16);
    const V16 s = max16(v, mul16(v, set16(-1.0f)));
    size[h] = each([&](int i) { return select_lt(set1(limit), mul(s.part[i], s.part[i]), set1(0.0f), s.part[i]); });
  }
  const float most = max_lanes(max16(size[0], size[1])), least = peak * 0x1p-7f;
  return most > least ? most : least;
}

// Takes what lies beyond +-127 out of 32 rounded numbers; returns it, in steps of 128.
Bytes32 take_high(VI (&whole)[2 * kParts]) {
  VI above[2 * kParts];
  for (int i = 0; i < 2 * kParts; ++i) {
    const VF w = to_float(whole[i]);
    const VF steps = to_float(to_int(mul(w, set1(0x1p-7f))));
    above[i] = to_int(select_lt(mul(w, w), set1(127.5f * 127.5f), set1(0.0f), steps));
    whole[i] = subi(whole[i], shl<7>(above[i]));
  }
  return pack_bytes(above);
}

// Count stretches, at most four, from x on. What a stretch has one of is a lane of a vector, so that no number is
// worked on alone; lanes beyond Count repeat the first.
template <int Count>
TENFOLD_INLINE void quantize_stretches(const float* x, float limit, Stretch* to, HighStretch* high, size_t pitch) {
  V16 size[4];
  for (int n = 0; n < 4; ++n) {
    const float* p = x + (n < Count ? n : 0) * kActGroup;
    const V16 v = load16(p), w = load16(p + 16), minus = set16(-1.0f);
    size[n] = max16(max16(v, mul16(v, minus)), max16(w, mul16(w, minus)));
  }
  const F4 none = F4{};
  const F4 largest = max_lanes4(size);
  const F4 peak = largest > kSmallest ? largest : none;
  const unsigned split = lanes_set(peak * peak > limit) & ((1u << Count) - 1);
  F4 most = peak;  // of those that set the scale
  if (__builtin_expect(split != 0, 0))
    for (int n = 0; n < Count; ++n)
      if ((split >> n & 1u) != 0) most[n] = most_within(x + n * kActGroup, limit, peak[n]);
  const F4 scale = most / 127.0f;
  const F4 inverse = most > 0.0f ? 127.0f / most : none;

  Bytes32 codes[4];
  I4 outliers = {}, high_sums[2] = {};
  TENFOLD_UNROLL
  for (int n = 0; n < Count; ++n) {
    VI whole[2 * kParts];
    for (int i = 0; i < 2 * kParts; ++i) whole[i] = to_int(mul(load(x + n * kActGroup + i * kLanes), set1(inverse[n])));
    if (__builtin_expect((split >> n & 1u) != 0, 0)) {
      const Bytes32 above[4] = {take_high(whole)};
      store_bytes32(high[static_cast<size_t>(n) * pitch].codes, above[0]);
      outliers[n] = static_cast<int32_t>(quads_set(above[0]));
      I4 sums[2];
      sum_halves(above, sums);
      for (int h = 0; h < 2; ++h) high_sums[h][n] = sums[h][0];
    }
    codes[n] = pack_bytes(whole);
    store_bytes32(to[static_cast<size_t>(n) * pitch].codes, codes[n]);
  }
  for (int n = Count; n < 4; ++n) codes[n] = codes[0];
  I4 half[2];
  sum_halves(codes, half);
  if (__builtin_expect(split != 0, 0))
    for (int h = 0; h < 2; ++h) half[h] += 128 * high_sums[h];

  const I4 sum = half[0] + half[1];
  const auto valued = [&](I4 v) { return scale * __builtin_convertvector(v, F4); };
  const auto bits = [](I4 v) { return reinterpret_cast<F4>(v); };
  uint8_t* rest = reinterpret_cast<uint8_t*>(&to->scale);
  store_lanes(scale, valued(sum), valued(half[0]), valued(half[1]), Count, rest, pitch * sizeof(Stretch));
  store_lanes(bits(-8 * sum), bits(-128 * sum), bits(-128 * half[0]), bits(outliers), Count, rest + 16,
              pitch * sizeof(Stretch));
}

}  // namespace

// Symmetric, 127 levels a side, one scale per 32 elements, set by the largest that is no outlier.
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
  Stretch* stretch = to.stretch;
  HighStretch* high = to.high;
  int i = 0;
  for (; i + 4 * kActGroup <= cols; i += 4 * kActGroup, stretch += 4 * to.pitch, high += 4 * to.pitch)
    quantize_stretches<4>(x + i, limit, stretch, high, to.pitch);
  if (cols - i >= 2 * kActGroup) {
    quantize_stretches<2>(x + i, limit, stretch, high, to.pitch);
    i += 2 * kActGroup, stretch += 2 * to.pitch, high += 2 * to.pitch;
  }
  if (i < cols) quantize_stretches<1>(x + i, limit, stretch, high, to.pitch);
}

void put_panel(const float* sums, int rows, const float* residual, size_t residual_stride, float* out,
               size_t out_stride) {
  if (residual == nullptr)
    for (int r = 0; r < rows; ++r, sums += kPanel, out += out_stride) store16(out, load16(sums));
  else
    for (int r = 0; r < rows; ++r, sums += kPanel, residual += residual_stride, out += out_stride)
      store16(out, add16(load16(residual), load16(sums)));
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
