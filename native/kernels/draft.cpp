// Drawing a drafted token from a few rows of the vocabulary, with the noise that the target will draw with.
#include "draft.h"

#include <algorithm>

#include "noise.h"

namespace tenfold::TENFOLD_LEVEL {
namespace {

// 16 logits from `at`; -inf beyond the end.
struct alignas(64) Sixteen {
  float x[16];

  Sixteen(const float* logits, int at, int count) {
    if (count - at >= 16)
      store16(x, load16(logits + at));
    else
      for (int i = 0; i < 16; ++i) x[i] = at + i < count ? logits[at + i] : -INFINITY;
  }
  // NaN is passed over.
  float largest() const { return max_lanes(max16(load16(x), set16(-INFINITY))); }
};

// Of each lane's token: word token % 4 of block token / 4, chosen bit by bit.
TENFOLD_INLINE VF noise_of(uint64_t seed, int64_t position, VI token) {
  VI words[4];
  philox(seed, position, shr<2>(token), words);
  const VI odd = subi(set1i(0), andi(token, set1i(1))), high = subi(set1i(0), andi(shr<1>(token), set1i(1)));
  const auto choose = [](VI a, VI b, VI which) { return xori(a, andi(xori(a, b), which)); };
  return gumbel_lane(choose(choose(words[0], words[1], odd), choose(words[2], words[3], odd), high));
}

}  // namespace

BestRow best_row(const float* logits, const int32_t* ids, int count, float temperature, uint64_t seed,
                 int64_t position) {
  BestRow best{-INFINITY, -1};
  for (int at = 0; at < count; at += 16) {
    Sixteen scores(logits, at, count);
    if (temperature > 0.0f) {
      // Cannot win with the largest noise there is: rounding is monotone, so neither can its true score.
      if (scores.largest() / temperature + kMostNoise < best.score) continue;
      const VF scale = set1(temperature);
      for (int i = 0; i < 16; i += kLanes) {
        const VI id = loadi(ids + at + i);
        store(scores.x + i, add(noise_of(seed, position, id), div(load(scores.x + i), scale)));
      }
    }
    const float highest = scores.largest();
    if (highest > best.score) {
      int lane = 0;
      while (scores.x[lane] != highest) ++lane;
      best = {highest, at + lane};
    }
  }
  return best;
}

Normalizer normalizer(const float* logits, int count, float temperature) {
  float peak = -INFINITY;
  for (int at = 0; at < count; at += 16) peak = std::max(peak, Sixteen(logits, at, count).largest());
  const VF shift = set1(peak), scale = set1(temperature);
  V16 total = set16(0.0f);
  for (int at = 0; at < count; at += 16) {
    const Sixteen own(logits, at, count);
    total = add16(total, each([&](int part) { return exp_lane(div(sub(load(own.x + part * kLanes), shift), scale)); }));
  }
  const float sum = sum_lanes(total);
  if (!std::isfinite(sum)) return {peak, NAN};
  alignas(64) float log[kLanes];
  store(log, log_lane(set1(sum)));
  return {peak, log[0]};
}

}  // namespace tenfold::TENFOLD_LEVEL
