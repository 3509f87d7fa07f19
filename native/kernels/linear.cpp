// Linear: one panel of 16 outputs times a few activation rows. Weights are unpacked once a group and used by every
// row, so a panel is read from memory once for up to `tile_rows` rows; each row's sums are the same whatever the tile.
#include "linear.h"

#include "simd.h"

namespace tenfold::TENFOLD_LEVEL {
namespace {

// How far ahead of its use a weight is fetched. With several rows a group is worth a hundred instructions and more, so
// that out-of-order execution alone no longer runs ahead of memory.
constexpr size_t kPrefetchBytes = 4096;

TENFOLD_INLINE void prefetch(const uint8_t* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + kPrefetchBytes + i, 0, 3);
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

// -zero * sum of a stretch's codes (its half `h` for groups of 16), of either plane. With a minimum, 4-bit codes have
// no zero point; 8-bit codes always have 128 added.
template <Format F, int Group, bool Minimum, class S>
TENFOLD_INLINE int32_t correction(const S& s, int h) {
  if constexpr (F == Format::Q4) return Minimum ? 0 : s.minus8;
  return Group == 16 ? s.minus128_half[h] : s.minus128;
}

template <Format F, int Group, bool Wide, bool Minimum, int Rows>
void quant_tile(const uint8_t* panel, int groups, const QuantRows& x, float* out) {
  constexpr Layout layout{F, Group, Wide, Minimum};
  constexpr int kHalves = kActGroup / Group;
  const size_t group_bytes = layout.group_bytes();
  for (int part = 0; part < kParts; ++part) {
    VF acc[Rows];
    TENFOLD_UNROLL
    for (int r = 0; r < Rows; ++r) acc[r] = set1(0.0f);
    const uint8_t* p = panel;
    const Stretch* a = x.stretch;
    const FineStretch* f = x.fine;
    for (int g = 0; g < groups; ++g, p += group_bytes) {
      const int h = g % kHalves;
      prefetch(p, group_bytes);
      const VF scale = load_scale(p, part, Wide);
      VF minimum;
      if constexpr (Minimum) minimum = load_scale(p + (Wide ? 64 : 32), part, Wide);
      typename CodesOf<F, Group>::type codes;
      codes.load_codes(p + layout.scale_bytes(), part);
      TENFOLD_UNROLL
      for (int r = 0; r < Rows; ++r) {
        VI d = codes.dot(a[r].codes + h * Group, correction<F, Group, Minimum>(a[r], h));
        VF s = mul(scale, set1(a[r].scale));
        if (__builtin_expect(a[r].scale < 0.0f, 0)) {
          d = addi(shl<8>(d), codes.dot(f[r].codes + h * Group, correction<F, Group, Minimum>(f[r], h)));
          s = mul(s, set1(-0x1p-8f));
        }
        acc[r] = fma(to_float(d), s, acc[r]);
        if constexpr (Minimum) acc[r] = fma(minimum, set1(Group == 16 ? a[r].sum_half[h] : a[r].sum), acc[r]);
      }
      if (h == kHalves - 1) {
        a += x.pitch;
        f += x.pitch;
      }
    }
    TENFOLD_UNROLL
    for (int r = 0; r < Rows; ++r) store(out + r * kPanel + part * kLanes, acc[r]);
  }
}

// Two sums, over even and odd columns, hide the latency of the multiply-add; they meet at the end.
template <bool Half, int Rows>
void float_tile(const uint8_t* panel, int cols, const float* x, size_t x_stride, float* out) {
  for (int part = 0; part < kParts; ++part) {
    VF even[Rows], odd[Rows];
    TENFOLD_UNROLL
    for (int r = 0; r < Rows; ++r) even[r] = odd[r] = set1(0.0f);
    for (int k = 0; k + 1 < cols; k += 2) {
      prefetch(panel + static_cast<size_t>(k) * (Half ? 32 : 64), Half ? 64 : 128);
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

#if defined(TENFOLD_AVX512)
constexpr int kTileRows = 16;
#else
constexpr int kTileRows = 4;
#endif

// Calls f<Rows> with the largest tile that fits, until `rows` are done.
template <int Rows, class F>
TENFOLD_INLINE int tiles(int done, int rows, const F& f) {
  while (rows - done >= Rows) {
    f.template operator()<Rows>(done);
    done += Rows;
  }
  return done;
}
template <class F>
TENFOLD_INLINE void all_tiles(int rows, const F& f) {
  int done = 0;
  if constexpr (kTileRows >= 16) {
    done = tiles<16>(done, rows, f);
    done = tiles<12>(done, rows, f);
    done = tiles<8>(done, rows, f);
    done = tiles<7>(done, rows, f);
    done = tiles<6>(done, rows, f);
    done = tiles<5>(done, rows, f);
  }
  done = tiles<4>(done, rows, f);
  done = tiles<3>(done, rows, f);
  done = tiles<2>(done, rows, f);
  tiles<1>(done, rows, f);
}

template <Format F, int Group, bool Wide, bool Minimum>
void quant_panel(const uint8_t* panel, int cols, const QuantRows& x, int rows, float* out) {
  all_tiles(rows, [&]<int Rows>(int done) {
    quant_tile<F, Group, Wide, Minimum, Rows>(panel, cols / Group, x.from(done), out + done * kPanel);
  });
}

template <Format F, int Group>
void quant_grid(Layout l, const uint8_t* panel, int cols, const QuantRows& x, int rows, float* out) {
  if (l.wide)
    l.minimum ? quant_panel<F, Group, true, true>(panel, cols, x, rows, out)
              : quant_panel<F, Group, true, false>(panel, cols, x, rows, out);
  else
    l.minimum ? quant_panel<F, Group, false, true>(panel, cols, x, rows, out)
              : quant_panel<F, Group, false, false>(panel, cols, x, rows, out);
}

}  // namespace

void linear_quant(Layout l, const uint8_t* panel, int cols, const QuantRows& x, int rows, float* out) {
  if (l.format == Format::Q4)
    quant_grid<Format::Q4, 32>(l, panel, cols, x, rows, out);
  else if (l.group == 32)
    quant_grid<Format::Q8, 32>(l, panel, cols, x, rows, out);
  else
    quant_grid<Format::Q8, 16>(l, panel, cols, x, rows, out);
}

void linear_float(Layout l, const uint8_t* panel, int cols, const float* x, size_t x_stride, int rows, float* out) {
  const auto run = [&]<bool Half>() {
    all_tiles(rows, [&]<int Rows>(int done) {
      float_tile<Half, Rows>(panel, cols, x + static_cast<size_t>(done) * x_stride, x_stride, out + done * kPanel);
    });
  };
  if (l.format == Format::BF16)
    run.template operator()<true>();
  else
    run.template operator()<false>();
}

int linear_tile_rows() { return kTileRows; }

}  // namespace tenfold::TENFOLD_LEVEL
