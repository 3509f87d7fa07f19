#include "speculation/state.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tenfold::speculation {
namespace {

constexpr double kGood = 0.5;
constexpr double kSequenceMemory = 20, kSequencePrior = 2.5;
constexpr double kNamespaceMemory = 64, kNamespacePrior = 4;
constexpr double kBlendMemory = 400, kBlendShare = 0.7, kBlendWeight = 1;
// Gain (in tokens) that a drafter is thought to bring before it was asked, and for how many asks that counts.
constexpr double kFirstGain = 0.4, kFirstGainWeight = 4;
constexpr double kGainMemory = 128;
constexpr double kCostMemory = 0.95;
constexpr double kProfileMemory = 32;
// In one call of so many, a position more than seems to pay is asked for.
constexpr int kLookEvery = 8;
// A call that takes less than this part of a step is not worth shortening.
constexpr double kCheap = 0.01;

}  // namespace

int context_of(double value) {
  if (value <= 0.0) return 0;
  return value < kGood ? 1 : 2;
}

Source::Source(int qualities, int max_draft, double credit_ms)
    : calibration(qualities),
      credit_ms(credit_ms),
      max_draft_(max_draft),
      length_(max_draft),
      profile_drafts_(kFirstGainWeight) {
  for (int j = 0; j < max_draft; ++j) profile_.push_back(kFirstGain * std::pow(0.7, j));
}

double Source::cost_ms(size_t sequences) const {
  return sequences ? (call_ms_ + each_ms_ * static_cast<double>(sequences)) * length_ : 0.0;
}

int Source::length(double tokens_per_ms, double step_ms, size_t sequences) {
  const auto count = static_cast<double>(sequences);
  const double position_ms = call_ms_ + each_ms_ * count;
  if (position_ms * max_draft_ < kCheap * step_ms) {
    length_ = max_draft_;
    return length_;
  }
  const double share = tokens_per_ms * position_ms / count;
  double best = 0, surplus = 0;
  length_ = 1;
  for (int j = 0; j < max_draft_; ++j) {
    surplus += profile_[static_cast<size_t>(j)] - share;
    if (surplus > best) {
      best = surplus;
      length_ = j + 1;
    }
  }
  const bool look = best > 0.0 && profile_asks_ % kLookEvery == 0 && length_ < max_draft_;
  return length_ + look;
}

void Source::took(size_t sequences, int length, double ms) {
  const auto count = static_cast<double>(sequences);
  ++calls;
  asks += static_cast<int64_t>(sequences);
  asking_ms += ms;
  ms /= length;
  const double expected = call_ms_ + each_ms_ * count;
  if (weight_ >= 2.0)
    ms = std::min(ms, 4.0 * expected + 1e-3);
  else if (weight_ != 0.0 && ms < 0.5 * expected)
    // The first call warmed something up.
    weight_ = n_ = nn_ = ms_ = nms_ = 0.0;
  const double keep = kCostMemory;
  weight_ = weight_ * keep + 1.0;
  n_ = n_ * keep + count;
  nn_ = nn_ * keep + count * count;
  ms_ = ms_ * keep + ms;
  nms_ = nms_ * keep + count * ms;
  const double n = n_ / weight_, mean = ms_ / weight_;
  const double variance = nn_ / weight_ - n * n;
  if (variance > 0.05 * n * n)
    each_ms_ = std::min(std::max((nms_ / weight_ - n * mean) / variance, 0.0), mean / n);
  else
    each_ms_ = 0.5 * mean / n;
  call_ms_ = mean - each_ms_ * n;
}

void Source::learn_profile(const std::vector<double>& gains, size_t drafts) {
  const auto count = static_cast<double>(drafts);
  ++profile_asks_;
  const double rate = count / (profile_drafts_ + count);
  profile_drafts_ = std::min(profile_drafts_ + count, kProfileMemory);
  for (size_t j = 0; j < gains.size(); ++j) profile_[j] += (gains[j] / count - profile_[j]) * rate;
}

Namespace::PerSource::PerSource()
    : odds(kNamespaceMemory, kNamespacePrior), blend(kBlendMemory, kBlendShare, kBlendWeight) {
  gains.fill(kFirstGain);
  asks.fill(kFirstGainWeight);
}

void Namespace::PerSource::learn_gain(int context, double gain) {
  const auto c = static_cast<size_t>(context);
  asks[c] = std::min(asks[c] + 1.0, kGainMemory);
  gains[c] += (gain - gains[c]) / asks[c];
}

Run::PerSource::PerSource(const std::array<double, kContexts>& gains)
    : odds(kSequenceMemory, kSequencePrior), gains(gains) {}

Run::Run(std::shared_ptr<Namespace> of) : name(std::move(of)) {
  for (const auto& source : name->sources) sources.emplace_back(source.gains);
}

}  // namespace tenfold::speculation
