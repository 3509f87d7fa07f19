// The kernel families, as a table of functions that each ISA level fills. No kernel allocates, locks or throws.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace tenfold {

enum class Activation : uint8_t { None, Silu, Gelu };

constexpr int kAttentionTile = 12;  // most query vectors of a tile
// Floats from one vector of a tile to the next. A constant, so that kernels find them without pointers; no power of
// two, whose multiples share cache sets.
constexpr int kAttentionStride = 512 + 16;

// A tile of attention: query vectors of one KV head against the pages of one sequence.
struct AttentionItem {
  const float* query;    // [count][kAttentionStride], already scaled and rotated
  float* const* output;  // [count] vectors of head_dim
  const int* limit;      // [count] the vector sees cache rows first .. limit - 1
  const int* first;      // [count] (sliding window)
  int count;
  int head_dim;
  const int32_t* pages;  // the sequence's page table
  const uint8_t* pool;   // page p starts at pool + p * page_bytes
  size_t page_bytes;
  size_t key_offset;                            // of this layer's and head's K [dim][16] within a page
  size_t value_offset;                          // of V [16][dim]
  size_t key_scale_offset, value_scale_offset;  // of their scales [16], if scaled
  size_t bias_offset;                           // of what is added to the scores [16], if biased
  bool scaled, biased;
  float softcap;   // 0: none
  float* scratch;  // kAttentionTile * kAttentionStride floats
  // Of a tile that several threads divide: [count][product_pages][16] floats.
  float* products;
  int product_pages;  // at least those that the limits reach into
};

// What of the linear family may be chosen per machine. No choice changes a bit of any result.
struct LinearTuning {
  int prefetch_bytes = 4096;               // how far ahead of its use a weight is fetched
  int pair_rows = 17;                      // from so many rows on two panels are multiplied at once
  size_t block_bytes = size_t{256} << 10;  // codes of the rows that a thread puts through all panels at a time
};

// Where K and V of a row go: a line of a page.
struct KvLine {
  uint8_t* keys;    // [dim][16]
  uint8_t* values;  // [16][dim]
  int line;
  float *key_scale, *value_scale;  // of the line, in Q8
};

struct SampleParams {
  float temperature, top_p, min_p, repetition, presence, frequency;
  int top_k;
  uint64_t seed;
  int64_t position;
  const int32_t* history_tokens;
  const int32_t* history_counts;
  int history;
  const int32_t* bias_tokens;
  const float* bias_values;
  int biases;
  const uint32_t* mask = nullptr;  // bit t % 32 of word t / 32: token t may be drawn; null: every token may
  int logprobs;                    // -1: none
};

struct SampleScratch {
  float* values;  // [vocab]
  int32_t* ids;   // [vocab]
};

struct SampleResult {
  int32_t token;
  float logprob;
};

// Of some rows of the vocabulary: the one with the highest score; -1 where no logit is a number above -inf.
struct BestRow {
  float score;
  int32_t row;
};

// Log-probability of a row: (logit - peak) / temperature - log_sum.
struct Normalizer {
  float peak, log_sum;
};

struct Kernels {
  const char* isa;
  // out[p * out_pitch + r * kPanel + c] of one or two panels of a layout for `rows` activation rows.
  void (*linear_quant)(Layout layout, const uint8_t* const* panels, int count, int cols, const QuantRows& x, int rows,
                       float* out, size_t out_pitch, const LinearTuning& tuning);
  // out[r * kPanel + c] of one panel.
  void (*linear_float)(Layout layout, const uint8_t* panel, int cols, const float* x, size_t x_stride, int rows,
                       float* out, const LinearTuning& tuning);

  // One row, into row 0 of `to`.
  void (*quantize)(const float* x, int cols, const QuantRows& to);
  // out = x / sqrt(mean(x^2) + eps) * (weight + offset); may be in place. width is a multiple of 16.
  void (*rms_norm)(const float* x, const float* weight, float offset, float eps, int width, float* out);
  void (*gate)(Activation activation, const float* a, const float* b, int count, float* out);
  void (*rope)(const float* x, const float* cosine, const float* sine, int rotary, int width, float scale, float* out);
  void (*softcap)(float* x, int count, float cap);

  // dim is a multiple of 16, at most 512.
  void (*store_kv)(KvFormat format, const KvLine& to, const float* k, const float* v, int dim);
  void (*attention)(KvFormat format, const AttentionItem& item);
  // The same in two halves, for threads that divide a tile: products of queries and keys, for pages begin .. end - 1
  // of the table; once all pages have theirs, elements begin .. end - 1 (multiples of 16) of the results.
  void (*attention_products)(KvFormat format, const AttentionItem& item, int begin, int end);
  void (*attention_values)(KvFormat format, const AttentionItem& item, int begin, int end);

  // May change `logits` in place (bias and penalties). top_*: [logprobs].
  SampleResult (*sample)(float* logits, int vocab, const SampleParams& p, SampleScratch scratch, int32_t* top_tokens,
                         float* top_logprobs);
  void (*gumbel)(uint64_t seed, int64_t position, int first_token, int count, float* out);

  // Argmax over rows of logit / temperature + Gumbel(seed, position, ids[row]), or of logit at temperature 0; the first
  // of equal ones. `ids` can be read up to a multiple of 16.
  BestRow (*best_row)(const float* logits, const int32_t* ids, int count, float temperature, uint64_t seed,
                      int64_t position);
  // temperature above 0. NaN where a logit is.
  Normalizer (*normalizer)(const float* logits, int count, float temperature);

  // Dot products of bytes out of registers; returns how many multiplications. `result` goes in and out.
  int64_t (*dot_products)(int rounds, int32_t* result);
};

namespace portable {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}

}  // namespace tenfold
