// Asking drafters, and learning from the text how far their drafts come true.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "speculation/state.h"

namespace tenfold::speculation {

// By the bit length of a number of sequences: batches of about one size are alike.
constexpr size_t kBatches = 64;
size_t batch_class(size_t sequences);

// A draft that can be verified.
struct Weighed {
  size_t source = 0;
  std::vector<int32_t> tokens;
  std::vector<double> chances;  // that the first 1, 2 ... stand, with caution; falls
  std::vector<double> gains;    // tokens that each position would bring beyond its rows, were it the only draft
  double value = 0;             // their sum

  bool found() const { return !tokens.empty(); }
  void clear();
};

// What time is worth in a step.
struct Terms {
  std::vector<double> added;  // what 0, 1, 2 ... rows more cost, in tokens
  double price = 0;           // of a row at its cheapest, in tokens
  double rate = 0;            // tokens per millisecond
  double plain_ms = 0;        // a step without drafts

  // What gains shrink by as the price rises from 0 to 1: those of chances that are spread evenly do so with its square.
  // Gains are learnt and used in this unit, so that they hold when the load changes.
  double room() const;
};

// Whom to ask for how much.
struct Question {
  size_t source = 0;
  std::vector<size_t> asked;  // which sequences of the step
  std::vector<int> lengths;   // most tokens for each
  int length = 0;             // most of all
};

// What a drafter answered: a draft for each sequence that it was asked about, one after the other.
struct Drafts {
  std::vector<int32_t> tokens;
  std::vector<double> survival;  // as many
  std::vector<size_t> ends;      // of each draft in `tokens`
  std::vector<int> qualities;    // of each draft

  void add(int quality);  // The tokens since the last one are a draft.
};

// The drafters, with what is known of them. Owns the step under way as far as asking is concerned.
class Asker {
 public:
  // `qualities`: of each drafter.
  Asker(const std::vector<int>& qualities, int max_draft, double one_row_ms);

  // Before anything is asked in a step.
  void begin_step();

  // The step's sequences, the most tokens that each has use for, and which are `free` to have a draft. Drafters are
  // then asked by `ask` and `answer` in turn, one call of each at most, cheapest first, so that a costly one is asked
  // where the others found nothing.
  void begin_asking(const std::vector<Run*>& runs, const std::vector<int>& limits, const std::vector<size_t>& free,
                    Terms terms);

  // Whether there is another question.
  bool ask();
  const Question& question() const { return question_; }

  // The answer to it, and what it took. Throws std::invalid_argument for what is no answer, and then nothing was
  // learnt.
  void answer(const Drafts& drafts, double took_ms);

  // The best draft of each sequence.
  const std::vector<Weighed>& best() const { return best_; }
  const Terms& terms() const { return terms_; }

  // How many tokens of each draft were admitted, and what they bring, all together, beyond their rows.
  void admitted(const std::vector<size_t>& counts, double surplus);

  // A step went by: allowances grow, up to `most_ms` or one call.
  void grant(double step_ms, size_t sequences, double most_ms);

  // Holds the drafts of a sequence against what was drawn behind its text of `Run::length` tokens.
  void score(Run& run, std::span<const int32_t> drawn);

  const std::vector<Source>& sources() const { return sources_; }
  Source& source(size_t index) { return sources_[index]; }
  int64_t step() const { return step_; }
  double spent_ms() const { return spent_ms_; }  // in drafters, in this step

 private:
  struct Call {
    size_t source, asked;
    int length;
    double room;
  };

  void whom(size_t index, std::vector<size_t>& asked);
  double weigh(size_t index, Run& run, std::span<const int32_t> tokens, const double* survival, int quality);
  void learn_gain(size_t index, Run& run, double before, double value, double room);
  bool compare(Run& run, Shadow& shadow, std::span<const int32_t> drawn);

  std::vector<Source> sources_;
  std::vector<size_t> by_cost_;
  int64_t step_ = 0;
  double spent_ms_ = 0;
  // By the batch's size, roughly: what drafts brought in steps that all sequences were asked for, and what they would
  // have brought one by one, in tokens, decayed. The cheapest rows are shared.
  std::array<double, kBatches> together_, alone_;

  // The step under way.
  bool asked_all_ = false, waiting_ = false;
  std::vector<Call> calls_;
  std::vector<Run*> runs_;
  std::vector<int> limits_;
  std::vector<size_t> free_;
  Terms terms_;
  size_t next_ = 0;  // of by_cost_
  Question question_;
  std::vector<Weighed> best_;
  // Scratch.
  Weighed weighed_;
  std::vector<size_t> left_;
  std::vector<double> gains_;
};

}  // namespace tenfold::speculation
