// What is remembered: of a drafter, of a namespace, of a sequence.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "speculation/acceptance.h"

namespace tenfold::speculation {

// What the drafters before found, when one is asked: nothing that pays, something, or something good.
constexpr int kContexts = 3;

// Which of the contexts a sequence is in, by the net gain of the best draft so far.
int context_of(double value);

// A drafter, how far its claims hold, what asking it costs, and how long its drafts should be.
class Source {
 public:
  Source(int qualities, int max_draft, double credit_ms);

  // Expected time of a call, whatever the sequences; of a sequence more in the call; of a call for so many.
  double call_ms() const { return call_ms_ * length_; }
  double each_ms() const { return each_ms_ * length_; }
  double cost_ms(size_t sequences) const;

  // Tokens to ask for. A drafter that takes no time to speak of gives all that it has; of another, as many positions as
  // bring more than their share of its time, and one more now and then to see.
  int length(double tokens_per_ms, double step_ms, size_t sequences);

  // A call for so many sequences and tokens took so long. The time is thought to grow with the length, as that of a
  // recurrent head does. Decayed least squares; an outlier is cut.
  void took(size_t sequences, int length, double ms);

  // Net gains of each position that was asked for, summed over the drafts of a call.
  void learn_profile(const std::vector<double>& gains, size_t drafts);

  Calibration calibration;
  // Time that asking it may take although it does not seem to pay.
  double credit_ms;
  // The step in which it last brought something.
  int64_t paid_step = 0;
  int64_t calls = 0, asks = 0, drafts = 0, drafted = 0, accepted = 0;
  double asking_ms = 0;

 private:
  int max_draft_, length_;
  std::vector<double> profile_;  // what each position adds to the net gain of a draft
  int64_t profile_asks_ = 0;
  double profile_drafts_;
  // Time of a call by position, as a line over the number of sequences, and the sums it comes from.
  double call_ms_ = 0, each_ms_ = 0;
  double weight_ = 0, n_ = 0, nn_ = 0, ms_ = 0, nms_ = 0;
};

// How drafts fare in a namespace, by source, and what asking brings there, by context.
struct Namespace {
  struct PerSource {
    PerSource();
    // Asking brought so many tokens beyond their cost in rows.
    void learn_gain(int context, double gain);

    Odds odds;
    Blend blend;  // how much a sequence's own odds count
    std::array<double, kContexts> gains, asks;
  };

  explicit Namespace(size_t sources) : sources(sources) {}

  std::vector<PerSource> sources;
};

// A draft whose tokens are known, verified or not, and held against the text.
struct Shadow {
  size_t source = 0;
  std::vector<int32_t> tokens;
  std::vector<int> cells;  // of the calibration, for each token
  size_t position = 0;     // the next to compare ...
  int64_t at = 0;          // ... and where in the sequence its token is
  bool done() const { return position == cells.size(); }
};

// A sequence under way.
struct Run {
  struct PerSource {
    explicit PerSource(const std::array<double, kContexts>& gains);

    Odds odds;
    std::array<double, kContexts> gains;
    int64_t asked = 0;  // the step in which it was asked last
    Shadow older;       // an earlier draft that has come true so far; done() if there is none
  };

  explicit Run(std::shared_ptr<Namespace> name);

  std::shared_ptr<Namespace> name;
  std::vector<PerSource> sources;
  std::vector<Shadow> fresh;  // drafts of this step
  int chosen = -1;            // the source whose draft is being verified
  int64_t length = 0;         // its tokens before the step
};

}  // namespace tenfold::speculation
