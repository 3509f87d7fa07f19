// Attention over KV pages, one page after another with the softmax kept online (arXiv 1805.02867), lanes across the 16
// keys of a page for the scores and across head elements for the values.
//
// A tile holds up to kAttentionTile query vectors of one KV head: the query heads of its group, for one or several
// rows. A page is read once for the whole tile. Every vector has its own limit; a page that lies outside it changes
// nothing, bit for bit (its probabilities are exactly 0 and its correction exactly 1), so tiles may be cut in any way.
#include "attention.h"

#include <type_traits>

#include "simd.h"

namespace tenfold::TENFOLD_LEVEL {
namespace {

constexpr float kFloor = -1e30f;  // finite, so that floor - floor is 0 and not NaN

struct Bf16 {
  using type = uint16_t;
  static TENFOLD_INLINE VF get(const uint16_t* p) { return load_bf16(p); }
};
struct F32 {
  using type = float;
  static TENFOLD_INLINE VF get(const float* p) { return load(p); }
};

struct Q8 {
  using type = int8_t;
  static TENFOLD_INLINE VF get(const int8_t* p) { return to_float(load_int8(p)); }
};

// Fetches what one iteration will read; bytes at least a cache line, or the part of one that begins at p.
template <size_t Bytes, class E>
TENFOLD_INLINE void fetch(const E* p) {
  const uint8_t* line = reinterpret_cast<const uint8_t*>(p);
  if constexpr (Bytes < 64) {
    if ((reinterpret_cast<uintptr_t>(p) & 63) == 0) __builtin_prefetch(line, 0, 3);
  } else {
    for (size_t i = 0; i < Bytes; i += 64) __builtin_prefetch(line + i, 0, 3);
  }
}

template <class T, int N>
void tile(const AttentionItem& item, int begin) {
  using E = typename T::type;
  constexpr bool kScaled = std::is_same_v<T, Q8>;
  const int dim = item.head_dim;
  const float* const* query = item.query + begin;
  const int* limit = item.limit + begin;
  const int* first = item.first + begin;

  float* sums = item.scratch;  // [N][dim]
  alignas(64) float p[N][16];
  float peak[N];
  V16 total[N];
  int last = 0, start = first[0];
  for (int n = 0; n < N; ++n) {
    peak[n] = kFloor;
    total[n] = set16(0.0f);
    last = limit[n] > last ? limit[n] : last;
    start = first[n] < start ? first[n] : start;
    for (int d = 0; d < dim; ++d) sums[n * dim + d] = 0.0f;
  }

  for (int page = start / kPageRows; page * kPageRows < last; ++page) {
    const uint8_t* base = item.pool + static_cast<size_t>(item.pages[page]) * item.page_bytes;
    const E* keys = reinterpret_cast<const E*>(base + item.key_offset);
    const E* values = reinterpret_cast<const E*>(base + item.value_offset);
    // Lines that nobody here may see are not even multiplied by 0: a page keeps what an earlier owner left in it.
    const int lines = last - page * kPageRows < 16 ? last - page * kPageRows : 16;
    // Pages lie apart, so no hardware guesses the next one: it is fetched a line at a time while this one is used.
    const int after = (page + 1) * kPageRows < last ? page + 1 : page;
    const uint8_t* next_base = item.pool + static_cast<size_t>(item.pages[after]) * item.page_bytes;
    const E* next_keys = reinterpret_cast<const E*>(next_base + item.key_offset);
    const E* next_values = reinterpret_cast<const E*>(next_base + item.value_offset);

    for (int part = 0; part < kParts; ++part) {
      VF even[N], odd[N];
      TENFOLD_UNROLL
      for (int n = 0; n < N; ++n) even[n] = odd[n] = set1(0.0f);
      for (int d = 0; d < dim; d += 2) {
        if (part == 0) fetch<2 * 16 * sizeof(E)>(next_keys + d * 16);
        const VF k0 = T::get(keys + d * 16 + part * kLanes);
        const VF k1 = T::get(keys + (d + 1) * 16 + part * kLanes);
        TENFOLD_UNROLL
        for (int n = 0; n < N; ++n) {
          even[n] = fma(k0, set1(query[n][d]), even[n]);
          odd[n] = fma(k1, set1(query[n][d + 1]), odd[n]);
        }
      }
      TENFOLD_UNROLL
      for (int n = 0; n < N; ++n) {
        VF score = add(even[n], odd[n]);
        if constexpr (kScaled)
          score = mul(score, load(reinterpret_cast<const float*>(base + item.key_scale_offset) + part * kLanes));
        store(p[n] + part * kLanes, score);
      }
    }

    float correction[N];
    for (int n = 0; n < N; ++n) {
      if (item.softcap > 0.0f) {
        for (int part = 0; part < kParts; ++part) {
          const VF e = exp_lane(mul(load(p[n] + part * kLanes), set1(2.0f / item.softcap)));
          const VF t = sub(set1(1.0f), div(set1(2.0f), add(set1(1.0f), e)));
          store(p[n] + part * kLanes, mul(set1(item.softcap), t));
        }
      }
      const int low = first[n] - page * kPageRows, high = limit[n] - page * kPageRows;
      if (low > 0 || high < 16)
        for (int j = 0; j < 16; ++j)
          if (j < low || j >= high) p[n][j] = -INFINITY;
      const V16 scores = load16(p[n]);
      const float highest = max_lanes(scores);
      const float next = highest > peak[n] ? highest : peak[n];
      const V16 both = each([&](int i) { return sub(scores.part[i], set1(next)); });
      const V16 weights = exp16(both);
      // Only what multiplies V has V's scale; the sum of the weights has not.
      if constexpr (kScaled)
        store16(p[n], mul16(weights, load16(reinterpret_cast<const float*>(base + item.value_scale_offset))));
      else
        store16(p[n], weights);
      alignas(64) float one[kLanes];
      store(one, exp_lane(set1(peak[n] - next)));
      correction[n] = one[0];
      total[n] = fma16(total[n], set16(correction[n]), weights);
      peak[n] = next;
    }

    for (int d = 0; d < dim; d += kLanes) {
      VF acc[N];
      TENFOLD_UNROLL
      for (int n = 0; n < N; ++n) acc[n] = mul(load(sums + n * dim + d), set1(correction[n]));
      for (int j = 0; j < lines; ++j) {
        fetch<kLanes * sizeof(E)>(next_values + j * dim + d);
        const VF v = T::get(values + j * dim + d);
        TENFOLD_UNROLL
        for (int n = 0; n < N; ++n) acc[n] = fma(v, set1(p[n][j]), acc[n]);
      }
      TENFOLD_UNROLL
      for (int n = 0; n < N; ++n) store(sums + n * dim + d, acc[n]);
    }
  }

  TENFOLD_UNROLL
  for (int n = 0; n < N; ++n) {
    const VF whole = set1(sum_lanes(total[n]));
    float* out = item.output[begin + n];
    for (int d = 0; d < dim; d += kLanes) store(out + d, div(load(sums + n * dim + d), whole));
  }
}

template <class T>
void run(const AttentionItem& item) {
  int done = 0;
  const auto all = [&]<int N>() {
    while (item.count - done >= N) {
      tile<T, N>(item, done);
      done += N;
    }
  };
#if defined(TENFOLD_AVX512)
  all.template operator()<12>();
  all.template operator()<9>();
  all.template operator()<8>();
  all.template operator()<6>();
  all.template operator()<5>();
#endif
  all.template operator()<4>();
  all.template operator()<3>();
  all.template operator()<2>();
  all.template operator()<1>();
}

}  // namespace

void attention(KvFormat format, const AttentionItem& item) {
  switch (format) {
    case KvFormat::BF16:
      return run<Bf16>(item);
    case KvFormat::F32:
      return run<F32>(item);
    case KvFormat::Q8:
      return run<Q8>(item);
  }
}

}  // namespace tenfold::TENFOLD_LEVEL
