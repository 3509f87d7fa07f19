#include "speculation/asking.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace tenfold::speculation {
namespace {

// Share of the time of steps that may go into asking a drafter that does not seem to pay.
constexpr double kAsking = 0.0025;
// What is left of it for a drafter that has brought nothing for long, and in how many steps it halves.
constexpr double kLeastAsking = 0.001, kHalvingSteps = 1000;
// The time, in plain steps, that a drafter is trusted with at the start, and the calls it may make whatever the first
// of them took: one that was held up says nothing of the next.
constexpr double kTrustSteps = 2;
constexpr int kTrustedCalls = 3;
// Gains are estimates: asking must bring so much more than it costs.
constexpr double kMargin = 1.1;
constexpr double kGainRate = 0.05;
// What is known of a sequence fades when a drafter is not asked, in so many steps to a half, after so many.
constexpr double kFadingSteps = 64;
constexpr int kSoon = 8;
constexpr double kLeastChance = 0.02, kLeastRoom = 0.02;
constexpr double kTogetherMemory = 64, kTogetherPrior = 2;
constexpr int kSortedEvery = 16;

}  // namespace

size_t batch_class(size_t sequences) { return std::min(static_cast<size_t>(std::bit_width(sequences)), kBatches - 1); }

void Weighed::clear() {
  tokens.clear();
  chances.clear();
  gains.clear();
  value = 0;
}

double Terms::room() const { return price < 1.0 ? std::max(kLeastRoom, (1.0 - price) * (1.0 - price)) : 0.0; }

void Drafts::add(int quality) {
  ends.push_back(tokens.size());
  qualities.push_back(quality);
}

Asker::Asker(const std::vector<int>& qualities, int max_draft, double one_row_ms) : by_cost_(qualities.size()) {
  if (max_draft < 1) throw std::invalid_argument("max_draft: must be 1 or more");
  for (const int count : qualities) sources_.emplace_back(count, max_draft, kTrustSteps * one_row_ms);
  std::iota(by_cost_.begin(), by_cost_.end(), size_t{0});
  together_.fill(kTogetherPrior);
  alone_.fill(kTogetherPrior);
}

void Asker::begin_step() {
  ++step_;
  spent_ms_ = 0.0;
  asked_all_ = waiting_ = false;
  calls_.clear();
  next_ = by_cost_.size();
}

void Asker::begin_asking(const std::vector<Run*>& runs, const std::vector<int>& limits, const std::vector<size_t>& free,
                         Terms terms) {
  runs_ = runs;
  limits_ = limits;
  free_ = free;
  terms_ = std::move(terms);
  best_.resize(runs.size());
  for (Weighed& draft : best_) draft.clear();
  if (step_ % kSortedEvery == 1)
    std::stable_sort(by_cost_.begin(), by_cost_.end(),
                     [&](size_t a, size_t b) { return sources_[a].cost_ms(1) < sources_[b].cost_ms(1); });
  next_ = 0;
}

bool Asker::ask() {
  waiting_ = false;
  const double room = terms_.room();
  while (next_ < by_cost_.size()) {
    Question& q = question_;
    q.source = by_cost_[next_++];
    whom(q.source, q.asked);
    if (q.asked.empty()) continue;
    const double rate = room != 0.0 ? terms_.rate / room : std::numeric_limits<double>::infinity();
    q.length = sources_[q.source].length(rate, terms_.plain_ms, q.asked.size());
    q.lengths.clear();
    for (const size_t i : q.asked) q.lengths.push_back(std::min(q.length, limits_[i]));
    asked_all_ = asked_all_ || q.asked.size() == free_.size();
    waiting_ = true;
    return true;
  }
  return false;
}

void Asker::answer(const Drafts& drafts, double took_ms) {
  if (!waiting_) throw std::invalid_argument("answer: nothing was asked");
  if (!(took_ms >= 0.0)) throw std::invalid_argument("answer: took_ms must not be negative");
  const Question& q = question_;
  Source& source = sources_[q.source];
  const size_t count = q.asked.size();
  if (drafts.ends.size() != count || drafts.qualities.size() != count)
    throw std::invalid_argument("a drafter gave " + std::to_string(drafts.ends.size()) + " drafts for " +
                                std::to_string(count) + " sequences");
  if (drafts.survival.size() != drafts.tokens.size() || drafts.ends.back() != drafts.tokens.size() ||
      !std::is_sorted(drafts.ends.begin(), drafts.ends.end()))
    throw std::invalid_argument("a draft needs a chance of survival for each token");
  for (const int quality : drafts.qualities)
    if (quality < 0 || quality >= source.calibration.qualities())
      throw std::invalid_argument("a draft has quality " + std::to_string(quality) + ", its drafter's are 0 to " +
                                  std::to_string(source.calibration.qualities() - 1));
  waiting_ = false;
  const double room = terms_.room();
  size_t first = 0;
  for (size_t k = 0; k < count; ++k) {
    const size_t i = q.asked[k], end = drafts.ends[k];
    const size_t useful = std::min({end - first, static_cast<size_t>(q.lengths[k]), terms_.added.size() - 1});
    Run& run = *runs_[i];
    const double value = weigh(q.source, run, {drafts.tokens.data() + first, useful}, drafts.survival.data() + first,
                               drafts.qualities[k]);
    Weighed& best = best_[i];
    const double before = best.value;
    learn_gain(q.source, run, before, value, room);
    if (useful && (!best.found() || value > before)) std::swap(best, weighed_);
    first = end;
  }
  spent_ms_ += took_ms;
  source.took(count, q.length, took_ms);
  if (room != 0.0) calls_.push_back({q.source, count, q.length, room});
}

// The sequences to ask a drafter about.
void Asker::whom(size_t index, std::vector<size_t>& asked) {
  Source& source = sources_[index];
  const double each = kMargin * source.each_ms() * terms_.rate;
  const double room = terms_.room();
  asked.clear();
  if (room != 0.0) {
    const size_t b = batch_class(runs_.size());
    const double scale = room * together_[b] / alone_[b];
    double surplus = -kMargin * source.call_ms() * terms_.rate;
    for (const size_t i : free_) {
      const auto context = static_cast<size_t>(context_of(best_[i].value));
      const double gain = runs_[i]->sources[index].gains[context] * scale;
      if (gain > each) {
        asked.push_back(i);
        surplus += gain - each;
      }
    }
    if (surplus <= 0.0) asked.clear();
  }
  if (asked.size() == free_.size()) return;
  const size_t asleep = free_.size() - asked.size();
  const bool trusted = source.calls < kTrustedCalls;
  if (source.credit_ms < source.cost_ms(std::min(asleep, size_t{4})) && !trusted) return;
  left_.clear();
  std::set_difference(free_.begin(), free_.end(), asked.begin(), asked.end(), std::back_inserter(left_));
  if (source.each_ms() > 0.0) {
    const double affordable = (source.credit_ms - (asked.empty() ? source.call_ms() : 0.0)) / source.each_ms();
    const auto paid = static_cast<size_t>(std::clamp(affordable, trusted ? 1.0 : 0.0, 1e9));
    if (paid < asleep) {
      std::stable_sort(left_.begin(), left_.end(), [&](size_t a, size_t b) {
        return runs_[a]->sources[index].asked < runs_[b]->sources[index].asked;
      });
      left_.resize(paid);
    }
  }
  const double spent = source.cost_ms(left_.size()) - (asked.empty() ? 0.0 : source.call_ms());
  source.credit_ms -= trusted ? std::min(spent, std::max(source.credit_ms, 0.0)) : spent;
  asked.insert(asked.end(), left_.begin(), left_.end());
  std::sort(asked.begin(), asked.end());
}

// Calibrates the useful part of a draft into `weighed_`, and keeps it as a shadow. Returns its net gain in tokens.
double Asker::weigh(size_t index, Run& run, std::span<const int32_t> tokens, const double* survival, int quality) {
  Run::PerSource& of_run = run.sources[index];
  const int64_t gap = step_ - of_run.asked;
  if (gap > kSoon) of_run.odds.fade(std::pow(0.5, static_cast<double>(gap) / kFadingSteps));
  if (tokens.empty()) return 0.0;
  const Calibration& calibration = sources_[index].calibration;
  const Namespace::PerSource& of_name = run.name->sources[index];
  const double common = of_name.odds.factor();
  const double own = of_run.odds.factor() * common, share = of_name.blend.share();
  // Beyond that a token will not be verified, so it need not be looked at.
  const double least = std::max(kLeastChance, 0.25 * std::min(terms_.price, 1.0));
  double value = 0, expected = 0, chance = 1, claimed = 1;
  Shadow& shadow = run.fresh.emplace_back();
  shadow.source = index;
  shadow.at = run.length;
  shadow.cells.reserve(tokens.size());
  weighed_.clear();
  weighed_.source = index;
  for (size_t j = 0; j < tokens.size(); ++j) {
    const int cell = calibration.cell(quality, static_cast<int>(j), claimed > 0.0 ? survival[j] / claimed : 0.0);
    claimed = survival[j];
    const double p = calibration.low(cell);
    const double here = shifted(p, common);
    chance *= here + share * (shifted(p, own) - here);
    shadow.cells.push_back(cell);
    weighed_.chances.push_back(chance);
    expected += chance;
    const double gain = expected - terms_.added[j + 1] - value;
    weighed_.gains.push_back(std::max(gain, 0.0));
    if (gain > 0.0)
      value += gain;
    else if (chance < least)
      break;
  }
  shadow.tokens.assign(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(shadow.cells.size()));
  weighed_.tokens = shadow.tokens;
  weighed_.value = value;
  return value;
}

// Asking found a draft of this value, where drafters before had found one of value `before`.
void Asker::learn_gain(size_t index, Run& run, double before, double value, double room) {
  const double gain = std::max(0.0, value - before);
  if (gain > 0.0) sources_[index].paid_step = step_;
  Run::PerSource& of_run = run.sources[index];
  if (room != 0.0) {
    // Where no draft can pay, nothing is learnt of how much one would.
    const int context = context_of(before);
    double& known = of_run.gains[static_cast<size_t>(context)];
    const auto gap = static_cast<double>(step_ - of_run.asked);
    known += (gain / room - known) * std::min(0.5, kGainRate * gap);
    run.name->sources[index].learn_gain(context, gain / room);
  }
  of_run.asked = step_;
}

void Asker::admitted(const std::vector<size_t>& counts, double surplus) {
  double alone = 0;
  for (const Weighed& draft : best_) alone += draft.value;
  if (asked_all_ && alone > 0.0) {
    const size_t b = batch_class(best_.size());
    const double keep = 1.0 - 1.0 / kTogetherMemory;
    together_[b] = together_[b] * keep + surplus;
    alone_[b] = alone_[b] * keep + alone;
  }
  for (const Call& call : calls_) {
    gains_.assign(static_cast<size_t>(call.length), 0.0);
    for (size_t i = 0; i < best_.size(); ++i)
      if (best_[i].source == call.source)
        for (size_t j = 0; j < counts[i]; ++j) gains_[j] += best_[i].gains[j] / call.room;
    sources_[call.source].learn_profile(gains_, call.asked);
  }
}

void Asker::grant(double step_ms, size_t sequences, double most_ms) {
  waiting_ = false;
  for (Source& source : sources_) {
    const double share = kAsking * std::pow(0.5, static_cast<double>(step_ - source.paid_step) / kHalvingSteps);
    source.credit_ms = std::min(source.credit_ms + std::max(share, kLeastAsking) * step_ms,
                                std::max(most_ms, source.cost_ms(sequences)));
  }
}

void Asker::score(Run& run, std::span<const int32_t> drawn) {
  for (Run::PerSource& of : run.sources)
    if (!of.older.done() && (of.older.at != run.length || !compare(run, of.older, drawn))) of.older = Shadow();
  for (Shadow& shadow : run.fresh) {
    // One at a time is followed further, so that a long draft is judged by its start only once.
    Shadow& older = run.sources[shadow.source].older;
    if (compare(run, shadow, drawn) && older.done()) older = std::move(shadow);
  }
  run.fresh.clear();
}

// Whether something is left of the draft to compare: not once it failed or came true to its end.
bool Asker::compare(Run& run, Shadow& shadow, std::span<const int32_t> drawn) {
  Calibration& calibration = sources_[shadow.source].calibration;
  Namespace::PerSource& of_name = run.name->sources[shadow.source];
  Run::PerSource& of_run = run.sources[shadow.source];
  for (const int32_t token : drawn) {
    const int cell = shadow.cells[shadow.position];
    const bool stood = shadow.tokens[shadow.position] == token;
    const double mean = calibration.mean(cell);
    const double here = shifted(mean, of_name.odds.factor());
    of_name.blend.add(here, shifted(here, of_run.odds.factor()), stood);
    of_run.odds.add(here, stood);
    of_name.odds.add(mean, stood);
    calibration.add(cell, stood);
    ++shadow.position;
    if (!stood || shadow.done()) return false;
  }
  shadow.at += static_cast<int64_t>(drawn.size());
  return !drawn.empty();
}

}  // namespace tenfold::speculation
