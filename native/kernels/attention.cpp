// Attention over KV pages, one page after another with the softmax kept online (arXiv 1805.02867), lanes across the 16
// keys of a page for the scores and across head elements for the values.
//
// A tile holds up to kAttentionTile query vectors of one KV head: the query heads of its group, for one or several
// rows. It is worked on in blocks of vectors whose sums fit the registers; a page is read once for the whole block.
// Every vector has its own limit; a page that lies outside it changes nothing, bit for bit (its probabilities are
// exactly 0 and its correction exactly 1), so tiles may be cut in any way.
//
// Each page goes through three stages: products of queries and keys, weights, values. Products of a page depend on no
// other page, and an element of a sum on no other element. So several pages are multiplied at a time, which shares what
// is loaded and hides what one page waits for; and threads can divide a tile, by pages for the products and by elements
// for the values. Weights and values are always added page after page, so none of this changes a bit.
#include "attention.h"

#include <algorithm>
#include <type_traits>

#include "simd.h"

// Functions whose inner loop needs all registers: inlined, they would share them with their caller's constants.
#define TENFOLD_APART __attribute__((noinline))

namespace tenfold::TENFOLD_LEVEL {
namespace {

constexpr float kFloor = -1e30f;  // finite, so that floor - floor is 0 and not NaN
constexpr size_t kStride = kAttentionStride;

// Registers for sums and for what is added to them.
#if defined(TENFOLD_AVX512)
constexpr int kRegisters = 30;
#else
constexpr int kRegisters = 15;
#endif
// Of pages, or of vectors of V, as many side by side as leave a register for each sum and each of them, and one.
constexpr int side_by_side(int vectors) { return std::max(1, std::min(4, (kRegisters - 1) / (vectors + 1))); }

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

// Fetches what one iteration will read; a line that several iterations share is asked for by each, which costs little.
template <size_t Bytes, class E>
TENFOLD_INLINE void fetch(const E* p) {
  for (size_t i = 0; i < Bytes; i += 64) __builtin_prefetch(reinterpret_cast<const uint8_t*>(p) + i, 0, 3);
}

// The highest of each of N rows of 16, in lanes 0 .. N - 1.
template <int N>
TENFOLD_INLINE V16 max_rows(const float (*rows)[16]) {
#if defined(TENFOLD_AVX512)
  // Two rows are folded into one vector, then four, each within its quarters; then the quarters are.
  const auto pair = [&](int n) {
    const VF a = load(rows[std::min(n, N - 1)]), b = load(rows[std::min(n + 1, N - 1)]);
    return _mm512_castps_pd(max(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  };
  const auto four = [&](int n) {
    const __m512d a = pair(n), b = pair(n + 2);
    return max(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  };
  const auto halve = [](VF a, VF b) { return max(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD)); };
  const VF first = four(0);
  const VF second = N > 4 ? four(4) : first;
  const VF third = N > 8 ? four(8) : first;
  return {halve(halve(first, second), halve(third, third))};
#else
  alignas(64) float highest[16] = {};
  for (int n = 0; n < N; ++n) highest[n] = max_lanes(load16(rows[n]));
  return load16(highest);
#endif
}

// K and V of a page, and of the page that will be read after it.
template <class E>
struct PageView {
  const E *keys, *values, *next_keys, *next_values;
};

template <class E>
PageView<E> view(const AttentionItem& item, int at, int after) {
  const uint8_t* here = item.pool + static_cast<size_t>(item.pages[at]) * item.page_bytes;
  // Pages lie apart, so no hardware guesses the next one: it is fetched a line at a time while this one is used.
  const uint8_t* next = item.pool + static_cast<size_t>(item.pages[after]) * item.page_bytes;
  return {reinterpret_cast<const E*>(here + item.key_offset), reinterpret_cast<const E*>(here + item.value_offset),
          reinterpret_cast<const E*>(next + item.key_offset), reinterpret_cast<const E*>(next + item.value_offset)};
}

// N query vectors, and all that is kept of them from page to page.
template <int N>
struct Block {
  static constexpr int kBlockParts = (N + kLanes - 1) / kLanes;

  const AttentionItem& item;
  const int at;        // of the first of them within the tile
  const int* limit;    // [N]
  const int* first;    // [N]
  const float* query;  // [N][kStride]
  float* sums;         // [N][kStride]
  alignas(64) float peak[16];
  alignas(64) float total[N][16];
  int start, last;   // rows that any of the vectors sees
  int begins, ends;  // rows that all of them see

  Block(const AttentionItem& of, int begin)
      : item(of),
        at(begin),
        limit(of.limit + begin),
        first(of.first + begin),
        query(of.query + begin * kStride),
        sums(of.scratch) {
    start = *std::min_element(first, first + N);
    begins = *std::max_element(first, first + N);
    ends = *std::min_element(limit, limit + N);
    last = *std::max_element(limit, limit + N);
  }

  int pages() const { return (last + kPageRows - 1) / kPageRows; }

  // Products of queries and keys of P pages: [P][N][16].
  template <class T, int P>
  TENFOLD_APART void multiply(const PageView<typename T::type>* pages, float (*scores)[16]) const {
    constexpr size_t kLine = 16 * sizeof(typename T::type);
    const int dim = item.head_dim;
    for (int part = 0; part < kParts; ++part) {
      VF sum[P][N];
      TENFOLD_UNROLL
      for (int g = 0; g < P; ++g) {
        TENFOLD_UNROLL
        for (int n = 0; n < N; ++n) sum[g][n] = set1(0.0f);
      }
      for (int d = 0; d < dim; ++d) {
        VF k[P];
        TENFOLD_UNROLL
        for (int g = 0; g < P; ++g) {
          if (part == 0) fetch<kLine>(pages[g].next_keys + d * 16);
          k[g] = T::get(pages[g].keys + d * 16 + part * kLanes);
        }
        TENFOLD_UNROLL
        for (int n = 0; n < N; ++n) {
          const VF q = set1(query[n * kStride + d]);
          TENFOLD_UNROLL
          for (int g = 0; g < P; ++g) sum[g][n] = fma(k[g], q, sum[g][n]);
        }
      }
      TENFOLD_UNROLL
      for (int g = 0; g < P; ++g) {
        TENFOLD_UNROLL
        for (int n = 0; n < N; ++n) store(scores[g * N + n] + part * kLanes, sum[g][n]);
      }
    }
  }

  // What lies between products and scores, where there is any: the scales of K, the soft cap, the bias, the limits.
  TENFOLD_APART void adjust(const uint8_t* page, int row, float (*scores)[16]) const {
    alignas(64) static constexpr float kLine[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto of_page = [&](size_t offset) { return load16(reinterpret_cast<const float*>(page + offset)); };
    for (int n = 0; n < N; ++n) {
      V16 s = load16(scores[n]);
      if (item.scaled) s = mul16(s, of_page(item.key_scale_offset));
      if (item.softcap > 0.0f) {
        const VF one = set1(1.0f);
        for (VF& x : s.part) {
          const VF e = exp_lane(mul(x, set1(2.0f / item.softcap)));
          x = mul(set1(item.softcap), sub(one, div(set1(2.0f), add(one, e))));
        }
      }
      if (item.biased) s = add16(s, of_page(item.bias_offset));
      const VF low = set1(static_cast<float>(first[n] - row)), high = set1(static_cast<float>(limit[n] - row));
      const VF none = set1(-INFINITY);
      for (int i = 0; i < kParts; ++i) {
        const VF line = load(kLine + i * kLanes);
        s.part[i] = select_lt(line, low, none, select_lt(line, high, s.part[i], none));
      }
      store16(scores[n], s);
    }
  }

  // Products of P pages into weights, and what the sums before each page are worth from it on into corrections.
  template <int P>
  TENFOLD_APART void weigh(int index, float (*scores)[16], float (*corrections)[16]) {
    const auto page = [&](int g) { return item.pool + static_cast<size_t>(item.pages[index + g]) * item.page_bytes; };
    alignas(64) float peaks[P][16];
    for (int g = 0; g < P; ++g) {
      const int row = (index + g) * kPageRows;
      if (item.scaled) {
        const uint8_t* next = page(std::min(P + g, pages() - 1 - index));
        fetch<64>(next + item.key_scale_offset);
        fetch<64>(next + item.value_scale_offset);
      }
      if (item.scaled || item.biased || item.softcap > 0.0f || row < begins || row + kPageRows > ends)
        adjust(page(g), row, scores + g * N);
    }
    VF before[kBlockParts];
    TENFOLD_UNROLL
    for (int i = 0; i < kBlockParts; ++i) before[i] = load(peak + i * kLanes);
    TENFOLD_UNROLL
    for (int g = 0; g < P; ++g) {
      const V16 highest = max_rows<N>(scores + g * N);
      TENFOLD_UNROLL
      for (int i = 0; i < kBlockParts; ++i) {
        const VF here = highest.part[i], after = select_lt(before[i], here, here, before[i]);
        store(corrections[g] + i * kLanes, exp_lane(sub(before[i], after)));
        store(peaks[g] + i * kLanes, after);
        before[i] = after;
      }
    }
    TENFOLD_UNROLL
    for (int i = 0; i < kBlockParts; ++i) store(peak + i * kLanes, before[i]);
    for (int g = 0; g < P; ++g) {
      V16 scale = set16(1.0f);
      if (item.scaled) scale = load16(reinterpret_cast<const float*>(page(g) + item.value_scale_offset));
      TENFOLD_UNROLL
      for (int n = 0; n < N; ++n) {
        float* score = scores[g * N + n];
        const V16 s = load16(score);
        const VF after = set1(peaks[g][n]);
        V16 w = exp16(each([&](int i) { return sub(s.part[i], after); }));
        store16(total[n], fma16(load16(total[n]), set16(corrections[g][n]), w));
        // Only what multiplies V has V's scale; the sum of the weights has not.
        if (item.scaled) w = mul16(w, scale);
        store16(score, w);
      }
    }
  }

  // Adds elements d .. d + W * kLanes - 1 of the weighted lines of P pages to the sums.
  template <class T, int P, int W>
  TENFOLD_APART void add_values(const PageView<typename T::type>* pages, int row, int d, const float (*weights)[16],
                                const float (*corrections)[16]) {
    const int dim = item.head_dim;
    VF sum[N][W];
    TENFOLD_UNROLL
    for (int n = 0; n < N; ++n) {
      TENFOLD_UNROLL
      for (int w = 0; w < W; ++w) sum[n][w] = load(sums + n * kStride + d + w * kLanes);
    }
    for (int g = 0; g < P; ++g) {
      TENFOLD_UNROLL
      for (int n = 0; n < N; ++n) {
        TENFOLD_UNROLL
        for (int w = 0; w < W; ++w) sum[n][w] = mul(sum[n][w], set1(corrections[g][n]));
      }
      // Lines that nobody here may see are not even multiplied by 0: a page keeps what an earlier owner left in it.
      const int lines = std::min(last - row - g * kPageRows, kPageRows);
      const typename T::type* values = pages[g].values + d;
      const typename T::type* next = pages[g].next_values + d;
      const float* weight = weights[g * N];
      for (int j = 0; j < lines; ++j, ++weight, values += dim, next += dim) {
        VF v[W];
        fetch<W * kLanes * sizeof(typename T::type)>(next);
        TENFOLD_UNROLL
        for (int w = 0; w < W; ++w) v[w] = T::get(values + w * kLanes);
        TENFOLD_UNROLL
        for (int n = 0; n < N; ++n) {
          const VF p = set1(weight[n * 16]);
          TENFOLD_UNROLL
          for (int w = 0; w < W; ++w) sum[n][w] = fma(v[w], p, sum[n][w]);
        }
      }
    }
    TENFOLD_UNROLL
    for (int n = 0; n < N; ++n) {
      TENFOLD_UNROLL
      for (int w = 0; w < W; ++w) store(sums + n * kStride + d + w * kLanes, sum[n][w]);
    }
  }

  // Calls step<P>(page) for the pages begin .. end - 1, several at a time as long as there are.
  template <class F>
  static TENFOLD_INLINE void walk(int begin, int end, F step) {
    constexpr int kMany = side_by_side(N);
    for (; begin + kMany <= end; begin += kMany) step.template operator()<kMany>(begin);
    if constexpr (kMany > 1)
      for (; begin < end; ++begin) step.template operator()<1>(begin);
  }

  template <class T, int P>
  void view_pages(int index, int end, PageView<typename T::type>* views) const {
    for (int g = 0; g < P; ++g) views[g] = view<typename T::type>(item, index + g, std::min(index + g + P, end - 1));
  }

  // Where the products of a page are kept for other threads.
  float (*kept(int index) const)[16] {
    return reinterpret_cast<float (*)[16]>(item.products) + static_cast<size_t>(at) * item.product_pages +
           static_cast<size_t>(index) * N;
  }

  template <class T>
  void keep_products(int begin, int end) const {
    walk(std::max(begin, start / kPageRows), std::min(end, pages()), [&]<int P>(int index) {
      PageView<typename T::type> views[P];
      view_pages<T, P>(index, pages(), views);
      multiply<T, P>(views, kept(index));
    });
  }

  // Elements begin .. end - 1 of the results; products are computed here, or were kept.
  template <class T, bool Kept>
  void finish(int begin, int end) {
    constexpr int kWide = side_by_side(N) == 3 ? 2 : side_by_side(N);  // of which head sizes are multiples
    store16(peak, set16(kFloor));
    for (int n = 0; n < N; ++n) {
      store16(total[n], set16(0.0f));
      std::fill(sums + n * kStride + begin, sums + n * kStride + end, 0.0f);
    }
    walk(start / kPageRows, pages(), [&]<int P>(int index) {
      PageView<typename T::type> views[P];
      view_pages<T, P>(index, pages(), views);
      alignas(64) float scores[P * N][16];
      alignas(64) float corrections[P][16];
      if constexpr (Kept)
        std::memcpy(scores, kept(index), sizeof scores);
      else
        multiply<T, P>(views, scores);
      weigh<P>(index, scores, corrections);
      int d = begin;
      for (; d + kWide * kLanes <= end; d += kWide * kLanes)
        add_values<T, P, kWide>(views, index * kPageRows, d, scores, corrections);
      if constexpr (kWide > 2)
        for (; d + 2 * kLanes <= end; d += 2 * kLanes)
          add_values<T, P, 2>(views, index * kPageRows, d, scores, corrections);
      if constexpr (kWide > 1)
        for (; d < end; d += kLanes) add_values<T, P, 1>(views, index * kPageRows, d, scores, corrections);
    });
    for (int n = 0; n < N; ++n) {
      const VF whole = set1(sum_lanes(load16(total[n])));
      for (int d = begin; d < end; d += kLanes)
        store(item.output[at + n] + d, div(load(sums + n * kStride + d), whole));
    }
  }
};

// Cuts the tile into blocks and calls work<N>(first vector) for each.
template <class F>
void each_block(const AttentionItem& item, F work) {
  int done = 0;
  const auto all = [&]<int N>() {
    for (; item.count - done >= N; done += N) work.template operator()<N>(done);
  };
#if defined(TENFOLD_AVX512)
  all.template operator()<12>();
  all.template operator()<9>();
  all.template operator()<8>();
#endif
#if defined(TENFOLD_AVX512) || defined(TENFOLD_AVX2)
  all.template operator()<6>();
  all.template operator()<5>();
#endif
  all.template operator()<4>();
  all.template operator()<3>();
  all.template operator()<2>();
  all.template operator()<1>();
}

// Calls work.operator()<T>() with the reader of the format.
template <class F>
void with_format(KvFormat format, F work) {
  switch (format) {
    case KvFormat::BF16:
      return work.template operator()<Bf16>();
    case KvFormat::F32:
      return work.template operator()<F32>();
    case KvFormat::Q8:
      return work.template operator()<Q8>();
  }
}

}  // namespace

void attention(KvFormat format, const AttentionItem& item) {
  with_format(format, [&]<class T>() {
    each_block(item, [&]<int N>(int at) { Block<N>(item, at).template finish<T, false>(0, item.head_dim); });
  });
}

void attention_products(KvFormat format, const AttentionItem& item, int begin, int end) {
  with_format(format, [&]<class T>() {
    each_block(item, [&]<int N>(int at) { Block<N>(item, at).template keep_products<T>(begin, end); });
  });
}

void attention_values(KvFormat format, const AttentionItem& item, int begin, int end) {
  with_format(format, [&]<class T>() {
    each_block(item, [&]<int N>(int at) { Block<N>(item, at).template finish<T, true>(begin, end); });
  });
}

}  // namespace tenfold::TENFOLD_LEVEL
