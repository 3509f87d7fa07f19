// Drawing a token: filters, then argmax of logit / temperature + Gumbel(seed, position, token).
//
// No softmax is written to memory unless top_p or min_p need one.
#include "sample.h"

#include <algorithm>

#include "noise.h"

namespace tenfold::TENFOLD_LEVEL {
namespace {

// Noise of the 64 tokens 64 * chunk ...: of 16 blocks.
void gumbel_chunk(uint64_t seed, int64_t position, int chunk, float out[64]) {
  alignas(64) static constexpr int32_t kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  alignas(64) float noise[4][16];
  for (int part = 0; part < kParts; ++part) {
    VI words[4];
    philox(seed, position, addi(loadi(kLane + part * kLanes), set1i(chunk * 16)), words);
    for (int word = 0; word < 4; ++word) store(noise[word] + part * kLanes, gumbel_lane(words[word]));
  }
  for (int i = 0; i < 16; ++i)
    for (int word = 0; word < 4; ++word) out[4 * i + word] = noise[word][i];
}

float gumbel_of(uint64_t seed, int64_t position, int token) {
  alignas(64) float noise[64];
  gumbel_chunk(seed, position, token / 64, noise);
  return noise[token % 64];
}

// NaN is passed over.
float largest(const float* x, int count) {
  V16 best = set16(-INFINITY);
  int i = 0;
  for (; i + 16 <= count; i += 16) best = max16(load16(x + i), best);
  float peak = max_lanes(best);
  for (; i < count; ++i) peak = x[i] > peak ? x[i] : peak;
  return peak;
}

int first_of(const float* x, int count, float value) {
  for (int i = 0; i < count; ++i)
    if (x[i] == value) return i;
  return 0;  // only where every logit is NaN
}

// log(sum(exp(x))), lanes first, in the order of tokens.
float log_sum(const float* x, int count, float peak) {
  V16 total = set16(0.0f);
  const VF shift = set1(peak);
  int i = 0;
  for (; i + 16 <= count; i += 16)
    total = add16(total, each([&](int part) { return exp_lane(sub(load(x + i + part * kLanes), shift)); }));
  float sum = sum_lanes(total);
  for (; i < count; ++i) {
    alignas(64) float one[kLanes];
    store(one, exp_lane(set1(x[i] - peak)));
    sum += one[0];
  }
  if (!std::isfinite(sum)) return NAN;  // as is a logit
  alignas(64) float one[kLanes];
  store(one, log_lane(set1(sum)));
  return peak + one[0];
}

// Most likely first, ties to the lowest id.
void sort_top(const float* x, int vocab, int count, int32_t* ids) {
  std::partial_sort(ids, ids + count, ids + vocab,
                    [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
}

void adjust(float* logits, const SampleParams& p) {
  for (int i = 0; i < p.biases; ++i) logits[p.bias_tokens[i]] += p.bias_values[i];
  for (int i = 0; i < p.history; ++i) {
    float& x = logits[p.history_tokens[i]];
    const int32_t count = p.history_counts[i];
    x = x > 0.0f ? x / p.repetition : x * p.repetition;
    if (count > 0) {
      x -= p.frequency * static_cast<float>(count);
      x -= p.presence;
    }
  }
}

// Forbidden tokens can no more be drawn than ones at minus infinity. Words that forbid nothing are not read again, so
// that a wide mask costs little.
void forbid(float* logits, int vocab, const uint32_t* mask) {
  for (int begin = 0; begin < vocab; begin += 32) {
    const uint32_t word = mask[begin / 32];
    if (word == ~uint32_t{0}) continue;
    const int count = std::min(32, vocab - begin);
    if (word == 0)
      std::fill_n(logits + begin, count, -INFINITY);
    else
      for (int i = 0; i < count; ++i)
        if ((word >> i & 1) == 0) logits[begin + i] = -INFINITY;
  }
}

int draw_unfiltered(const float* logits, int vocab, const SampleParams& p) {
  // A token this far below the best cannot win: the noise lies within about [-2.9, 22.9].
  const float hopeless = largest(logits, vocab) / p.temperature - 27.0f;
  alignas(64) float scores[64];
  float best = -INFINITY;
  int token = -1;
  for (int chunk = 0; chunk * 64 < vocab; ++chunk) {
    const int begin = chunk * 64, count = std::min(64, vocab - begin);
    if (largest(logits + begin, count) / p.temperature < hopeless) continue;
    gumbel_chunk(p.seed, p.position, chunk, scores);
    for (int i = 0; i < count; ++i) scores[i] += logits[begin + i] / p.temperature;
    const float highest = largest(scores, count);
    if (highest > best) {
      best = highest;
      token = begin + first_of(scores, count, highest);
    }
  }
  return token;
}

// Tokens that top_k, top_p and min_p leave, as ids[0, count), most likely first.
int filter(const float* logits, int vocab, const SampleParams& p, SampleScratch scratch) {
  int32_t* ids = scratch.ids;
  float* weight = scratch.values;
  for (int i = 0; i < vocab; ++i) ids[i] = i;
  int count = p.top_k > 0 && p.top_k < vocab ? p.top_k : vocab;
  const double peak = static_cast<double>(largest(logits, vocab) / p.temperature);
  const bool by_mass = p.top_p < 1.0f;
  const auto weight_of = [&](int i) { return std::exp(static_cast<double>(logits[i] / p.temperature) - peak); };

  int sorted = 0;
  if (count < vocab) {
    sort_top(logits, vocab, count, ids);
    sorted = count;
  }
  if (by_mass) {
    double whole = 0;
    for (int i = 0; i < count; ++i) {
      const double w = weight_of(ids[i]);
      whole += w;
      weight[ids[i]] = static_cast<float>(w);
    }
    const double wanted = whole * static_cast<double>(p.top_p);
    double mass = 0;
    int kept = 0;
    // Usually a few hundred tokens hold the mass: sort only as many as are needed.
    while (kept < count && (kept == 0 || mass < wanted)) {
      if (kept == sorted) {
        const int more = std::min(count, std::max(64, sorted * 4));
        sort_top(logits, count, more, ids);
        sorted = more;
      }
      mass += static_cast<double>(weight[ids[kept++]]);
    }
    count = kept;
  }
  if (p.min_p > 0.0f) {
    int kept = 0;
    const double least = static_cast<double>(p.min_p);
    for (int i = 0; i < count; ++i)
      if (weight_of(ids[i]) >= least) ids[kept++] = ids[i];
    count = kept;
  }
  return count;
}

int draw_filtered(const float* logits, int vocab, const SampleParams& p, SampleScratch scratch) {
  const int count = filter(logits, vocab, p, scratch);
  float best = -INFINITY;
  int token = -1;
  for (int i = 0; i < count; ++i) {
    const int t = scratch.ids[i];
    const float score = logits[t] / p.temperature + gumbel_of(p.seed, p.position, t);
    if (score > best || (score == best && t < token)) {
      best = score;
      token = t;
    }
  }
  return token;
}

}  // namespace

void gumbel(uint64_t seed, int64_t position, int first_token, int count, float* out) {
  alignas(64) float noise[64];
  for (int t = first_token, have = -1; t < first_token + count; ++t) {
    if (t / 64 != have) gumbel_chunk(seed, position, have = t / 64, noise);
    out[t - first_token] = noise[t % 64];
  }
}

SampleResult sample(float* logits, int vocab, const SampleParams& p, SampleScratch scratch, int32_t* top_tokens,
                    float* top_logprobs) {
  float whole = 0.0f;
  const bool raw_needed = p.logprobs >= 0;
  if (raw_needed) {
    whole = log_sum(logits, vocab, largest(logits, vocab));
    if (p.logprobs > 0) {
      for (int i = 0; i < vocab; ++i) scratch.ids[i] = i;
      const int count = std::min(p.logprobs, vocab);
      sort_top(logits, vocab, count, scratch.ids);
      for (int i = 0; i < count; ++i) {
        top_tokens[i] = scratch.ids[i];
        top_logprobs[i] = logits[scratch.ids[i]] - whole;
      }
    }
  }
  // The raw logits of the adjusted tokens are needed again, if one of them is drawn.
  const bool adjusted = p.biases > 0 || p.history > 0;
  float* raw = scratch.values;
  if (raw_needed && adjusted) std::copy(logits, logits + vocab, raw = scratch.values + vocab);
  if (adjusted) adjust(logits, p);
  if (p.mask != nullptr) forbid(logits, vocab, p.mask);

  // NaN everywhere, or every token forbidden: there is nothing to draw, and somebody must be told.
  if (!(largest(logits, vocab) > -INFINITY)) return {-1, NAN};
  int token;
  if (p.temperature <= 0.0f)
    token = first_of(logits, vocab, largest(logits, vocab));
  else if (p.top_k == 0 && p.top_p >= 1.0f && p.min_p <= 0.0f)
    token = draw_unfiltered(logits, vocab, p);
  else
    token = draw_filtered(logits, vocab, p, scratch);
  if (token < 0) token = first_of(logits, vocab, largest(logits, vocab));
  return {token, raw_needed ? (adjusted ? raw[token] : logits[token]) - whole : 0.0f};
}

}  // namespace tenfold::TENFOLD_LEVEL
