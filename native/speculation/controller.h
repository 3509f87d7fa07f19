// Decides what is drafted where it was measured to pay.
//
// Every step it looks for the drafts that bring the most tokens per second over the whole batch: it maximises
// `expected tokens - rate * time`, where `rate` is the rate achieved lately (W. Dinkelbach, "On nonlinear fractional
// programming", 1967). Expected tokens come from Calibration and Odds, time from LiveCurve.
//
// Nothing is explored by verifying on trust. Since a text does not depend on who drafted what, every draft that was
// asked for, verified or not, is held against the text as it comes (Shadow). Three things cannot be learnt for nothing,
// and each has an allowance, a small share of the time spent in steps: asking drafters that do not seem to pay, timing
// steps of more rows where the curve says that they do not pay, and timing plain steps where everything is drafted (one
// in 500, or a few in 50 when times have changed).
//
// Step by step:
//
// 1. The price of a row in tokens: what the next rows cost at this batch, times the rate. At one or more, no draft can
//    pay ("load").
// 2. Drafters are asked in the order of their cost, one call each, for the sequences where their gain of late is above
//    their cost, and for others as the allowance goes.
// 3. A sequence takes the draft of which some length brings most: chances that its tokens stand, less the rows.
// 4. Tokens of all sequences are admitted by falling chance, as many as maximise the objective.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "speculation/admission.h"
#include "speculation/asking.h"
#include "speculation/curve.h"
#include "speculation/state.h"

namespace tenfold::speculation {

// What became of a draft in a step.
struct Outcome {
  static constexpr int kUnknown = -1;

  int slot = kUnknown;                // of a sequence that was not in the step: it is counted, nothing is learnt
  int64_t drafted = 0, accepted = 0;  // tokens verified, by whoever drafted them, and how many stood
  std::span<const int32_t> drawn;     // what the target committed
};

// The decisions of tenfold.speculate.controller, which calls the drafters. A sequence is known by a slot. Methods throw
// std::invalid_argument for slots that are none and lists that do not fit one another.
class Controller {
 public:
  // Why nothing was drafted: the sequence is about to end; drafts would pay alone, or no rows are left; no drafter
  // brought enough lately to be asked; none had a draft; none is worth its rows; a plain step, to time it.
  enum Idle { kLimit, kLoad, kAsleep, kNoDraft, kNotWorthIt, kProbe, kIdles };
  static constexpr std::array<const char*, kIdles> kIdleNames{"limit",    "load",         "asleep",
                                                              "no draft", "not worth it", "probe"};

  // `qualities`: of each drafter. `rows`, `ms`: where the live curve starts. `max_draft`: most tokens of a draft. The
  // curve is of sequences of `depth` tokens; each token more adds `token_ms` to a step.
  Controller(const std::vector<int>& qualities, const std::vector<int>& rows, const std::vector<double>& ms,
             int max_draft, double token_ms, int depth);

  // The sequence starts; returns its slot.
  int begin(const std::string& name_space);

  // It leaves, and its own statistics are forgotten, after its outcome if it is in the step under way.
  void end(int slot);

  // A step begins, of sequences with so many tokens. `rows`: rows that it may have in all beyond one a sequence.
  // `limits`: the most draft tokens that each sequence has use for. Returns whether a drafter is to be asked.
  bool propose(const std::vector<int>& slots, const std::vector<int64_t>& lengths, int rows,
               const std::vector<int>& limits);
  const Question& question() const { return asker_.question(); }

  // Its answer, and what it took. Returns whether another is to be asked.
  bool answer(const Drafts& drafts, double took_ms);

  // When none is to be asked any more: what is to be verified, by sequence of the step.
  size_t sequences() const { return step_slots_.size(); }
  std::span<const int32_t> draft(size_t sequence) const;

  // After the step: outcomes of its sequences, its rows (prefill included) and how long the program took for it.
  void observe(const std::vector<Outcome>& outcomes, int rows, double step_ms);

  // Counts so far.
  const std::vector<Source>& sources() const { return asker_.sources(); }
  int64_t steps() const { return sequence_steps_; }  // of a sequence
  int64_t committed() const { return committed_; }
  const std::array<int64_t, kIdles>& idle() const { return idle_; }

 private:
  struct Slot {
    std::optional<Run> run;
    bool open = false;   // in the step under way
    bool ended = false;  // and to be freed after it
  };

  Slot& slot(int index);
  void close(int index);
  double speedup(size_t n) const;
  double price_alone() const;
  double stretch(const std::vector<int64_t>& lengths) const;
  bool next();
  void choose();
  void learn_times(size_t n, int rows, int64_t committed, double step_ms);

  LiveCurve curve_;  // as if every sequence had `depth_` tokens
  double token_ms_;
  double depth_;
  Asker asker_;
  Admission admission_;
  int max_draft_;
  std::deque<Slot> slots_;  // a run stays where it is
  std::vector<int> spare_;
  std::unordered_map<std::string, std::shared_ptr<Namespace>> namespaces_;
  std::deque<std::string> namespace_names_;  // the oldest first
  // The step under way.
  std::vector<int> step_slots_, limits_;
  std::vector<Run*> runs_;
  std::vector<size_t> free_, counts_;
  double rate_ = 0;
  double stretch_ = 1;  // what the step takes beyond the curve, for what its sequences are longer
  // Rows of the last step that were no decodes: a long prompt is computed in several steps on end.
  int64_t other_rows_ = 0;
  // By the batch's size, roughly: tokens a sequence and time in units of a plain step, both decayed.
  std::array<double, kBatches> tokens_, time_;
  double timing_ms_;
  // Not 0: the step under way is made to be timed, and this is the rate that it should have had.
  double timing_rate_ = 0;
  int64_t sequence_steps_ = 0, committed_ = 0;
  std::array<int64_t, kIdles> idle_{};
};

}  // namespace tenfold::speculation
