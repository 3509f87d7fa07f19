#include "speculation/controller.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace tenfold::speculation {
namespace {

// Share of the time of steps that may go into timing, the plain steps it may take at the start, and the most that is
// saved up, so that it is not spent all at once.
constexpr double kTiming = 0.004, kFirstTimingSteps = 3, kMostSavedSteps = 2;
// Most rows beyond one a sequence that a step is searched for.
constexpr size_t kMostRows = 64;
constexpr size_t kMostNamespaces = 512;
// Steps that the achieved rate goes back, and what it starts with.
constexpr double kRateMemory = 64, kRatePrior = 8;
// A step that took so many times what it should says nothing of the rate.
constexpr double kOutlier = 4;
// No step has more rows.
constexpr int kMostStepRows = 1 << 24;
// Short sequences take off no more than that of a step's time.
constexpr double kLeastStretch = 0.25;

}  // namespace

Controller::Controller(const std::vector<int>& qualities, const std::vector<int>& rows, const std::vector<double>& ms,
                       int max_draft, double token_ms, int depth)
    : curve_(rows, ms),
      token_ms_(token_ms),
      depth_(depth),
      asker_(qualities, max_draft, curve_.at(1)),
      max_draft_(max_draft) {
  if (!(token_ms >= 0.0 && token_ms < INFINITY) || depth < 0)
    throw std::invalid_argument("token_ms and depth: must not be negative");
  tokens_.fill(kRatePrior);
  time_.fill(kRatePrior);
  timing_ms_ = kFirstTimingSteps * curve_.at(1);
}

int Controller::begin(const std::string& name) {
  auto found = namespaces_.find(name);
  if (found == namespaces_.end()) {
    if (namespaces_.size() >= kMostNamespaces) {
      namespaces_.erase(namespace_names_.front());
      namespace_names_.pop_front();
    }
    namespace_names_.push_back(name);
    found = namespaces_.emplace(name, std::make_shared<Namespace>(asker_.sources().size())).first;
  }
  if (spare_.empty()) {
    spare_.push_back(static_cast<int>(slots_.size()));
    slots_.emplace_back();
  }
  const int index = spare_.back();
  slots_[static_cast<size_t>(index)].run.emplace(found->second);
  spare_.pop_back();
  return index;
}

void Controller::end(int index) {
  Slot& of = slot(index);
  of.ended = true;
  if (!of.open) close(index);
}

Controller::Slot& Controller::slot(int index) {
  if (index < 0 || static_cast<size_t>(index) >= slots_.size() || !slots_[static_cast<size_t>(index)].run)
    throw std::invalid_argument("slot " + std::to_string(index) + " is no sequence's");
  return slots_[static_cast<size_t>(index)];
}

// The slot is no longer in a step under way; frees it if its sequence has left.
void Controller::close(int index) {
  Slot& of = slots_[static_cast<size_t>(index)];
  of.open = false;
  if (of.ended) {
    of.run.reset();
    of.ended = false;
    spare_.push_back(index);
  }
}

bool Controller::propose(const std::vector<int>& slots, const std::vector<int64_t>& lengths, int rows,
                         const std::vector<int>& limits) {
  const size_t n = slots.size();
  if (lengths.size() != n || limits.size() != n)
    throw std::invalid_argument("propose: every sequence has a length and a limit");
  for (const int index : slots)
    if (slot(index).ended) throw std::invalid_argument("slot " + std::to_string(index) + " has ended");
  asker_.begin_step();
  timing_rate_ = 0.0;
  stretch_ = stretch(lengths);
  // A step that was never observed: it failed.
  for (const int index : step_slots_)
    if (slots_[static_cast<size_t>(index)].open) close(index);
  step_slots_ = slots;
  limits_ = limits;
  runs_.clear();
  free_.clear();
  counts_.assign(n, 0);
  for (size_t i = 0; i < n; ++i) {
    Slot& of = slot(slots[i]);
    of.open = true;
    of.run->length = lengths[i];
    of.run->fresh.clear();
    of.run->chosen = -1;
    runs_.push_back(&*of.run);
    if (limits[i] > 0 && rows > 0) free_.push_back(i);
  }
  const auto nothing = [&](Idle why) {
    for (const int limit : limits) ++idle_[limit > 0 ? why : kLimit];
    return false;
  };
  if (free_.empty()) return nothing(kLoad);
  const int decodes = static_cast<int>(n);
  if (other_rows_ == 0 && curve_.doubtful(decodes)) return nothing(kProbe);

  Terms terms;
  terms.plain_ms = curve_.at(decodes) * stretch_;
  terms.rate = rate_ = speedup(n) * static_cast<double>(n) / terms.plain_ms;
  const size_t most = std::min({static_cast<size_t>(rows), free_.size() * static_cast<size_t>(max_draft_), kMostRows});
  curve_.beyond(decodes + static_cast<int>(other_rows_), static_cast<int>(most), terms.added);
  for (double& cost : terms.added) cost *= stretch_ * terms.rate;
  terms.price = terms.added[1];
  for (size_t k = 2; k <= std::min(most, static_cast<size_t>(max_draft_)); ++k)
    terms.price = std::min(terms.price, terms.added[k] / static_cast<double>(k));
  asker_.begin_asking(runs_, limits_, free_, std::move(terms));
  return next();
}

bool Controller::answer(const Drafts& drafts, double took_ms) {
  asker_.answer(drafts, took_ms);
  return next();
}

// The next question; if there is none, the choice.
bool Controller::next() {
  if (asker_.ask()) return true;
  const std::vector<double>& added = asker_.terms().added;
  const double surplus = admission_.admit(asker_.best(), added);
  asker_.admitted(admission_.counts(), surplus);
  if (other_rows_ == 0 && admission_.more_to_time(curve_, added, timing_ms_ * rate_)) timing_rate_ = rate_;
  choose();
  return false;
}

// What is verified, and why there is nothing where there is nothing.
void Controller::choose() {
  counts_ = admission_.counts();
  std::optional<double> alone;
  for (size_t i = 0; i < runs_.size(); ++i) {
    const Weighed& draft = asker_.best()[i];
    Run& run = *runs_[i];
    if (counts_[i] > 0) {
      run.chosen = static_cast<int>(draft.source);
      continue;
    }
    Idle why = kLimit;
    if (limits_[i] > 0) {
      if (!alone) alone = price_alone();
      if (draft.found()) {
        why = draft.chances[0] > *alone ? kLoad : kNotWorthIt;
      } else if (runs_.size() > 1 && asker_.terms().price >= 1.0 && 1.0 > *alone) {
        why = kLoad;
      } else {
        const bool asked = std::any_of(run.sources.begin(), run.sources.end(),
                                       [&](const Run::PerSource& of) { return of.asked == asker_.step(); });
        why = asked ? kNoDraft : kAsleep;
      }
    }
    ++idle_[why];
  }
}

std::span<const int32_t> Controller::draft(size_t sequence) const {
  const size_t count = counts_[sequence];
  return count == 0 ? std::span<const int32_t>() : std::span(asker_.best()[sequence].tokens).first(count);
}

void Controller::observe(const std::vector<Outcome>& outcomes, int rows, double step_ms) {
  if (!(step_ms >= 0.0) || rows < 0 || rows > kMostStepRows)
    throw std::invalid_argument("observe: step_ms must not be negative, rows be 0 to " + std::to_string(kMostStepRows));
  for (const Outcome& outcome : outcomes)
    if (outcome.slot != Outcome::kUnknown) slot(outcome.slot);
  int64_t drafted = 0, committed = 0;
  for (const Outcome& outcome : outcomes) {
    drafted += outcome.drafted;
    committed += static_cast<int64_t>(outcome.drawn.size());
    if (outcome.slot == Outcome::kUnknown || !slots_[static_cast<size_t>(outcome.slot)].open) continue;
    Slot& of = slots_[static_cast<size_t>(outcome.slot)];
    Run& run = *of.run;
    if (run.chosen >= 0) {
      Source& source = asker_.source(static_cast<size_t>(run.chosen));
      source.drafts += outcome.drafted > 0;
      source.drafted += outcome.drafted;
      source.accepted += outcome.accepted;
      run.chosen = -1;
    }
    asker_.score(run, outcome.drawn);
    close(outcome.slot);
  }
  const size_t n = outcomes.size();
  sequence_steps_ += static_cast<int64_t>(n);
  committed_ += committed;
  other_rows_ = std::max(int64_t{0}, rows - static_cast<int64_t>(n) - drafted);
  if (n > 0 && other_rows_ == 0) learn_times(n, rows, committed, step_ms);
  const double most = kMostSavedSteps * stretch_ * curve_.at(static_cast<int>(std::max(n, size_t{1})));
  timing_ms_ = std::min(timing_ms_ + kTiming * step_ms, most);
  asker_.grant(step_ms, n, most);
}

double Controller::speedup(size_t n) const {
  const size_t b = batch_class(n);
  return std::max(1.0, tokens_[b] / time_[b]);
}

// A step of decodes alone; the rows of a prompt take another time.
void Controller::learn_times(size_t n, int rows, int64_t committed, double step_ms) {
  const double most = kOutlier * stretch_ * curve_.at(rows), plain_ms = stretch_ * curve_.at(static_cast<int>(n));
  const size_t b = batch_class(n);
  const double keep = 1.0 - 1.0 / kRateMemory;
  tokens_[b] = tokens_[b] * keep + static_cast<double>(committed) / static_cast<double>(n);
  time_[b] = time_[b] * keep + std::min(step_ms + asker_.spent_ms(), most) / plain_ms;
  if (timing_rate_ > 0.0) {
    // The price of timing is what was lost against the rate.
    timing_ms_ -= std::max(0.0, std::min(step_ms, most) - static_cast<double>(committed) / timing_rate_);
    timing_ms_ = std::max(timing_ms_, -kMostSavedSteps * plain_ms);
    timing_rate_ = 0.0;
  }
  curve_.observe(rows, step_ms / stretch_);
}

// Attention reads every sequence's tokens in each step. The ratio of a step's time to that of a plain one, all that
// drafts are weighed by, hardly changes with them, but the time does, and what drafting costs is weighed against it:
// without this, a long conversation after short ones looks like rows that have become dear.
double Controller::stretch(const std::vector<int64_t>& lengths) const {
  double beyond = 0;
  for (const int64_t length : lengths) beyond += static_cast<double>(length) - depth_;
  const double plain_ms = curve_.at(static_cast<int>(std::max(lengths.size(), size_t{1})));
  return std::max(kLeastStretch, 1.0 + token_ms_ * beyond / plain_ms);
}

// What a row costs a sequence that decodes alone.
double Controller::price_alone() const {
  const double first = curve_.at(1);
  return speedup(1) * (curve_.at(2) - first) / first;
}

}  // namespace tenfold::speculation
