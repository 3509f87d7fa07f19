// Linear: one or two panels of 16 outputs times a few activation rows. Weights are read once a group for every row of a
// tile; each row's sums are the same whatever the tile.
#include "linear.h"

#include "simd.h"

namespace tenfold::TENFOLD_LEVEL {
namespace {

// With several rows a group is worth a hundred instructions and more, so that out-of-order execution alone no longer
// runs ahead of memory.
TENFOLD_INLINE void prefetch(const uint8_t* p, size_t bytes, const LinearTuning& tuning) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + tuning.prefetch_bytes + i, 0, 3);
}

TENFOLD_INLINE VF load_scale(const uint8_t* p, int part, bool wide) {
  return wide ? load(reinterpret_cast<const float*>(p) + part * kLanes)
              : load_f16(reinterpret_cast<const uint16_t*>(p) + part * kLanes);
}

TENFOLD_INLINE int32_t quad_of(const int8_t* codes, int quad) {
  int32_t q;
  std::memcpy(&q, codes + quad * 4, 4);
  return q;
}

// The codes of one group of kLanes outputs, ready to be multiplied with activation codes.
// dot() returns sum over the group of (code - zero) * activation; `correction` is -zero * sum(activation).
#if defined(TENFOLD_AVX512)

template <int Quads>
struct Codes8 {
  VI w[Quads];
  TENFOLD_INLINE void load_codes(const uint8_t* p, int) {
    TENFOLD_UNROLL
    for (int q = 0; q < Quads; ++q) w[q] = loadi(p + q * 64);
  }
  TENFOLD_INLINE VI dot(const int8_t* a, int32_t correction) const {
    VI acc = set1i(correction);
    TENFOLD_UNROLL
    for (int q = 0; q < Quads; ++q) acc = _mm512_dpbusd_epi32(acc, w[q], set1i(quad_of(a, q)));
    return acc;
  }
};
struct Codes4 {
  VI w[8];
  TENFOLD_INLINE void load_codes(const uint8_t* p, int) {
    const VI low = set1i(0x0F0F0F0F);
    TENFOLD_UNROLL
    for (int q = 0; q < 4; ++q) {
      const VI both = loadi(p + q * 64);
      w[q] = andi(both, low);
      w[q + 4] = andi(shr<4>(both), low);
    }
  }
  TENFOLD_INLINE VI dot(const int8_t* a, int32_t correction) const {
    VI acc = set1i(correction);
    TENFOLD_UNROLL
    for (int q = 0; q < 8; ++q) acc = _mm512_dpbusd_epi32(acc, w[q], set1i(quad_of(a, q)));
    return acc;
  }
};

#elif defined(TENFOLD_AVX2)

// No VNNI: maddubs saturates at 16 bits, so 8-bit codes go through |w| and sign(a, w), whose pair sums stay below
// 2^15 since activations are within +-127; the zero point is then already folded in.
template <int Quads>
struct Codes8 {
  VI w[Quads];
  TENFOLD_INLINE void load_codes(const uint8_t* p, int part) {
    TENFOLD_UNROLL
    for (int q = 0; q < Quads; ++q)
      w[q] = _mm256_xor_si256(loadi(p + q * 64 + part * 32), _mm256_set1_epi8(static_cast<char>(0x80)));
  }
  TENFOLD_INLINE VI dot(const int8_t* a, int32_t) const {
    const VI ones = _mm256_set1_epi16(1);
    VI acc = _mm256_setzero_si256();
    TENFOLD_UNROLL
    for (int q = 0; q < Quads; ++q) {
      const VI signed_a = _mm256_sign_epi8(set1i(quad_of(a, q)), w[q]);
      acc = addi(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w[q]), signed_a), ones));
    }
    return acc;
  }
};
struct Codes4 {
  VI w[8];
  TENFOLD_INLINE void load_codes(const uint8_t* p, int part) {
    const VI low = set1i(0x0F0F0F0F);
    TENFOLD_UNROLL
    for (int q = 0; q < 4; ++q) {
      const VI both = loadi(p + q * 64 + part * 32);
      w[q] = andi(both, low);
      w[q + 4] = andi(shr<4>(both), low);
    }
  }
  // Eight pair sums of at most 2 * 15 * 127 fit 16 bits together.
  TENFOLD_INLINE VI dot(const int8_t* a, int32_t correction) const {
    VI acc = _mm256_maddubs_epi16(w[0], set1i(quad_of(a, 0)));
    TENFOLD_UNROLL
    for (int q = 1; q < 8; ++q) acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(w[q], set1i(quad_of(a, q))));
    return addi(_mm256_madd_epi16(acc, _mm256_set1_epi16(1)), set1i(correction));
  }
};

#else

template <int Quads>
struct Codes8 {
  const uint8_t* p;
  TENFOLD_INLINE void load_codes(const uint8_t* codes, int part) { p = codes + part * kLanes * 4; }
  TENFOLD_INLINE VI dot(const int8_t* a, int32_t correction) const {
    int32_t acc[kLanes];
    for (int l = 0; l < kLanes; ++l) acc[l] = correction;
    TENFOLD_UNROLL
    for (int q = 0; q < Quads; ++q)
      for (int l = 0; l < kLanes; ++l)
        for (int k = 0; k < 4; ++k) acc[l] += p[q * 64 + l * 4 + k] * a[q * 4 + k];
    return loadi(acc);
  }
};
struct Codes4 {
  const uint8_t* p;
  TENFOLD_INLINE void load_codes(const uint8_t* codes, int part) { p = codes + part * kLanes * 4; }
  TENFOLD_INLINE VI dot(const int8_t* a, int32_t correction) const {
    int32_t acc[kLanes];
    for (int l = 0; l < kLanes; ++l) acc[l] = correction;
    TENFOLD_UNROLL
    for (int q = 0; q < 4; ++q)
      for (int l = 0; l < kLanes; ++l)
        for (int k = 0; k < 4; ++k) {
          const uint8_t both = p[q * 64 + l * 4 + k];
          acc[l] += (both & 15) * a[q * 4 + k] + (both >> 4) * a[q * 4 + 16 + k];
        }
    return loadi(acc);
  }
};

#endif

template <Format F, int Group>
struct CodesOf {
  using type = Codes8<Group / 4>;
};
template <int Group>
struct CodesOf<Format::Q4, Group> {
  using type = Codes4;
};

// -zero * sum of what a stretch's codes stand for (its half `h` for groups of 16). With a minimum, 4-bit codes have no
// zero point; 8-bit codes always have 128 added.
template <Format F, int Group, bool Minimum>
TENFOLD_INLINE int32_t correction(const Stretch& s, int h) {
  if constexpr (F == Format::Q4) return Minimum ? 0 : s.minus8;
  return Group == 16 ? s.minus128_half(h) : s.minus128;
}

// The quads of a stretch that belong to its half `h`.
template <int Group>
TENFOLD_INLINE uint32_t outliers_of(const Stretch& s, int h) {
  return Group == 16 ? (s.outliers >> (h * 4)) & 15u : s.outliers;
}

#if defined(TENFOLD_AVX512)

// Quad q of the codes of a group.
template <Format F>
TENFOLD_INLINE VI quad_codes(const uint8_t* codes, int q) {
  if constexpr (F == Format::Q8) return loadi(codes + q * 64);
  const VI both = loadi(codes + (q & 3) * 64);
  return andi(_mm512_srl_epi32(both, _mm_cvtsi32_si128(q & 4)), set1i(0x0F0F0F0F));
}

// Adds what the outliers of a stretch are worth to the sums of its row, a panel each.
template <Format F, int Panels>
TENFOLD_INLINE void add_outliers(uint32_t quads, const int8_t* high, const uint8_t* const* codes, VI* sums) {
  VI more[Panels];
  TENFOLD_UNROLL
  for (int p = 0; p < Panels; ++p) more[p] = _mm512_setzero_si512();
  do {
    const int q = __builtin_ctz(quads);
    quads &= quads - 1;
    const VI a = set1i(quad_of(high, q));
    TENFOLD_UNROLL
    for (int p = 0; p < Panels; ++p) more[p] = _mm512_dpbusd_epi32(more[p], quad_codes<F>(codes[p], q), a);
  } while (quads != 0);
  TENFOLD_UNROLL
  for (int p = 0; p < Panels; ++p) sums[p] = addi(sums[p], shl<7>(more[p]));
}

// Several rows times two panels: an activation is fetched once for both, codes are used as soon as they are unpacked.
// The multipliers of the core are the limit: 8 dot products and 2 multiplications for 32 columns.
template <Format F, int Group, bool Wide, bool Minimum, int Rows>
void quant_pair(const uint8_t* const* panels, int groups, const QuantRows& x, float* out, size_t out_pitch,
                const LinearTuning& tuning) {
  constexpr Layout layout{F, Group, Wide, Minimum};
  constexpr int kHalves = kActGroup / Group, kQuads = Group / 4;
  const size_t group_bytes = layout.group_bytes();
  VF acc[Rows][2];
  TENFOLD_UNROLL
  for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = set1(0.0f);
  const uint8_t* at[2] = {panels[0], panels[1]};
  const Stretch* a = x.stretch;
  const HighStretch* high = x.high;
  for (int g = 0; g < groups; ++g) {
    const int h = g % kHalves;
    const uint8_t* const codes[2] = {at[0] + layout.scale_bytes(), at[1] + layout.scale_bytes()};
    VI d[Rows][2];
    TENFOLD_UNROLL
    for (int r = 0; r < Rows; ++r) d[r][0] = d[r][1] = set1i(correction<F, Group, Minimum>(a[r], h));
    const auto multiply = [&](int q, VI w0, VI w1) TENFOLD_LAMBDA {
      TENFOLD_UNROLL
      for (int r = 0; r < Rows; ++r) {
        const VI v = set1i(quad_of(a[r].codes + h * Group, q));
        d[r][0] = _mm512_dpbusd_epi32(d[r][0], w0, v);
        d[r][1] = _mm512_dpbusd_epi32(d[r][1], w1, v);
      }
    };
    if constexpr (F == Format::Q4) {
      const VI low = set1i(0x0F0F0F0F);
      TENFOLD_UNROLL
      for (int q = 0; q < 4; ++q) {
        const VI b0 = loadi(codes[0] + q * 64), b1 = loadi(codes[1] + q * 64);
        multiply(q, andi(b0, low), andi(b1, low));
        multiply(q + 4, andi(shr<4>(b0), low), andi(shr<4>(b1), low));
      }
    } else {
      TENFOLD_UNROLL
      for (int q = 0; q < kQuads; ++q) multiply(q, loadi(codes[0] + q * 64), loadi(codes[1] + q * 64));
    }
    VF scale[2], minimum[2];
    TENFOLD_UNROLL
    for (int p = 0; p < 2; ++p) {
      prefetch(at[p], group_bytes, tuning);
      scale[p] = load_scale(at[p], 0, Wide);
      if constexpr (Minimum) minimum[p] = load_scale(at[p] + (Wide ? 64 : 32), 0, Wide);
    }
    TENFOLD_UNROLL
    for (int r = 0; r < Rows; ++r) {
      if (const uint32_t quads = outliers_of<Group>(a[r], h); __builtin_expect(quads != 0, 0))
        add_outliers<F, 2>(quads, high[r].codes + h * Group, codes, d[r]);
      TENFOLD_UNROLL
      for (int p = 0; p < 2; ++p) {
        acc[r][p] = fma(to_float(d[r][p]), mul(scale[p], set1(a[r].scale)), acc[r][p]);
        if constexpr (Minimum) acc[r][p] = fma(minimum[p], set1(Group == 16 ? a[r].sum_half[h] : a[r].sum), acc[r][p]);
      }
    }
    at[0] += group_bytes;
    at[1] += group_bytes;
    if (h == kHalves - 1) {
      a += x.pitch;
      high += x.pitch;
    }
  }
  TENFOLD_UNROLL
  for (int r = 0; r < Rows; ++r) {
    store(out + r * kPanel, acc[r][0]);
    store(out + out_pitch + r * kPanel, acc[r][1]);
  }
}

#endif

// The same for one panel whose codes are at hand. With few rows memory is the limit, and a loop that is hard to predict
// would be dearer than a whole second dot product.
template <Format F, int Group, int Rows, class Codes>
TENFOLD_INLINE void add_outliers([[maybe_unused]] uint32_t quads, const int8_t* high, const Codes& codes,
                                 [[maybe_unused]] const uint8_t* memory, VI& sum) {
#if defined(TENFOLD_AVX512)
  if constexpr (Rows > 4) return add_outliers<F, 1>(quads, high, &memory, &sum);
#endif
  sum = addi(sum, shl<7>(codes.dot(high, 0)));
}

template <Format F, int Group, bool Wide, bool Minimum, int Rows>
void quant_tile(const uint8_t* panel, int groups, const QuantRows& x, float* out, const LinearTuning& tuning) {
  constexpr Layout layout{F, Group, Wide, Minimum};
  constexpr int kHalves = kActGroup / Group;
  const size_t group_bytes = layout.group_bytes();
  for (int part = 0; part < kParts; ++part) {
    VF acc[Rows];
    TENFOLD_UNROLL
    for (int r = 0; r < Rows; ++r) acc[r] = set1(0.0f);
    const uint8_t* p = panel;
    const Stretch* a = x.stretch;
    const HighStretch* high = x.high;
    for (int g = 0; g < groups; ++g, p += group_bytes) {
      const int h = g % kHalves;
      prefetch(p, group_bytes, tuning);
      const VF scale = load_scale(p, part, Wide);
      VF minimum;
      if constexpr (Minimum) minimum = load_scale(p + (Wide ? 64 : 32), part, Wide);
      typename CodesOf<F, Group>::type codes;
      codes.load_codes(p + layout.scale_bytes(), part);
      TENFOLD_UNROLL
      for (int r = 0; r < Rows; ++r) {
        VI d = codes.dot(a[r].codes + h * Group, correction<F, Group, Minimum>(a[r], h));
        if (const uint32_t quads = outliers_of<Group>(a[r], h); __builtin_expect(quads != 0, 0)) {
          add_outliers<F, Group, Rows>(quads, high[r].codes + h * Group, codes, p + layout.scale_bytes(), d);
        }
        acc[r] = fma(to_float(d), mul(scale, set1(a[r].scale)), acc[r]);
        if constexpr (Minimum) acc[r] = fma(minimum, set1(Group == 16 ? a[r].sum_half[h] : a[r].sum), acc[r]);
      }
      if (h == kHalves - 1) {
        a += x.pitch;
        high += x.pitch;
      }
    }
    TENFOLD_UNROLL
    for (int r = 0; r < Rows; ++r) store(out + r * kPanel + part * kLanes, acc[r]);
  }
}

// Two sums, over even and odd columns, hide the latency of the multiply-add; they meet at the end.
template <bool Half, int Rows>
void float_tile(const uint8_t* panel, int cols, const float* x, size_t x_stride, float* out,
                const LinearTuning& tuning) {
  for (int part = 0; part < kParts; ++part) {
    VF even[Rows], odd[Rows];
    TENFOLD_UNROLL
    for (int r = 0; r < Rows; ++r) even[r] = odd[r] = set1(0.0f);
    for (int k = 0; k + 1 < cols; k += 2) {
      prefetch(panel + static_cast<size_t>(k) * (Half ? 32 : 64), Half ? 64 : 128, tuning);
      VF w0, w1;
      if constexpr (Half) {
        const VI pair = loadi(panel + static_cast<size_t>(k) * 32 + part * kLanes * 4);
        w0 = as_float(shl<16>(pair));
        w1 = as_float(andi(pair, set1i(static_cast<int32_t>(0xFFFF0000u))));
      } else {
        const float* p = reinterpret_cast<const float*>(panel) + static_cast<size_t>(k) * 16 + part * kLanes;
        w0 = load(p);
        w1 = load(p + 16);
      }
      TENFOLD_UNROLL
      for (int r = 0; r < Rows; ++r) {
        const float* row = x + static_cast<size_t>(r) * x_stride + k;
        even[r] = fma(w0, set1(row[0]), even[r]);
        odd[r] = fma(w1, set1(row[1]), odd[r]);
      }
    }
    if (cols % 2 != 0) {
      const int k = cols - 1;
      VF w0;
      if constexpr (Half)
        w0 = as_float(shl<16>(loadi(panel + static_cast<size_t>(k) * 32 + part * kLanes * 4)));
      else
        w0 = load(reinterpret_cast<const float*>(panel) + static_cast<size_t>(k) * 16 + part * kLanes);
      TENFOLD_UNROLL
      for (int r = 0; r < Rows; ++r) even[r] = fma(w0, set1(x[static_cast<size_t>(r) * x_stride + k]), even[r]);
    }
    TENFOLD_UNROLL
    for (int r = 0; r < Rows; ++r) store(out + r * kPanel + part * kLanes, add(even[r], odd[r]));
  }
}

// Calls f<Rows> with the largest tile that fits, until `rows` are done.
template <int Rows, class F>
TENFOLD_INLINE int tiles(int done, int rows, const F& f) {
  while (rows - done >= Rows) {
    f.template operator()<Rows>(done);
    done += Rows;
  }
  return done;
}
template <int Most, class F>
TENFOLD_INLINE void all_tiles(int rows, const F& f) {
  int done = 0;
  if constexpr (Most >= 16) done = tiles<16>(done, rows, f);
  if constexpr (Most >= 12) done = tiles<12>(done, rows, f);
  if constexpr (Most >= 8) done = tiles<8>(done, rows, f);
  if constexpr (Most >= 7) done = tiles<7>(done, rows, f);
  if constexpr (Most >= 6) done = tiles<6>(done, rows, f);
  if constexpr (Most >= 5) done = tiles<5>(done, rows, f);
  done = tiles<4>(done, rows, f);
  done = tiles<3>(done, rows, f);
  done = tiles<2>(done, rows, f);
  tiles<1>(done, rows, f);
}

#if defined(TENFOLD_AVX512)
constexpr int kTileRows = 16;
constexpr int kPairRows = 8;
#else
constexpr int kTileRows = 4;
#endif

template <Format F, int Group, bool Wide, bool Minimum>
void quant_panels(const uint8_t* const* panels, int count, int cols, const QuantRows& x, int rows, float* out,
                  size_t out_pitch, const LinearTuning& tuning) {
#if defined(TENFOLD_AVX512)
  if (count == 2) {
    all_tiles<kPairRows>(rows, [&]<int Rows>(int done) {
      quant_pair<F, Group, Wide, Minimum, Rows>(panels, cols / Group, x.from(done), out + done * kPanel, out_pitch,
                                                tuning);
    });
    return;
  }
#endif
  for (int i = 0; i < count; ++i)
    all_tiles<kTileRows>(rows, [&]<int Rows>(int done) {
      quant_tile<F, Group, Wide, Minimum, Rows>(panels[i], cols / Group, x.from(done),
                                                out + static_cast<size_t>(i) * out_pitch + done * kPanel, tuning);
    });
}

}  // namespace

void linear_quant(Layout l, const uint8_t* const* panels, int count, int cols, const QuantRows& x, int rows, float* out,
                  size_t out_pitch, const LinearTuning& tuning) {
  const auto run = [&]<Format F, int Group>() {
    if (l.wide)
      l.minimum ? quant_panels<F, Group, true, true>(panels, count, cols, x, rows, out, out_pitch, tuning)
                : quant_panels<F, Group, true, false>(panels, count, cols, x, rows, out, out_pitch, tuning);
    else
      l.minimum ? quant_panels<F, Group, false, true>(panels, count, cols, x, rows, out, out_pitch, tuning)
                : quant_panels<F, Group, false, false>(panels, count, cols, x, rows, out, out_pitch, tuning);
  };
  if (l.format == Format::Q4)
    run.template operator()<Format::Q4, 32>();
  else if (l.group == 32)
    run.template operator()<Format::Q8, 32>();
  else
    run.template operator()<Format::Q8, 16>();
}

void linear_float(Layout l, const uint8_t* panel, int cols, const float* x, size_t x_stride, int rows, float* out,
                  const LinearTuning& tuning) {
  const auto run = [&]<bool Half>() {
    all_tiles<kTileRows>(rows, [&]<int Rows>(int done) {
      float_tile<Half, Rows>(panel, cols, x + static_cast<size_t>(done) * x_stride, x_stride, out + done * kPanel,
                             tuning);
    });
  };
  if (l.format == Format::BF16)
    run.template operator()<true>();
  else
    run.template operator()<false>();
}

}  // namespace tenfold::TENFOLD_LEVEL
