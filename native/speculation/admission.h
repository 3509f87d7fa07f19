// Which drafted tokens a step verifies.
#pragma once

#include <cstddef>
#include <vector>

#include "speculation/asking.h"
#include "speculation/curve.h"

namespace tenfold::speculation {

class Admission {
 public:
  // How many tokens of each draft bring most, all together, beyond what their rows cost; returns how much.
  //
  // `added[k]`: what k rows more cost, in tokens; more rows than it tells of are not to be had. The chances of a draft
  // fall, so the k likeliest tokens are the best k and never leave one out before another.
  double admit(const std::vector<Weighed>& best, const std::vector<double>& added);

  // More tokens than were admitted, for a step that times the curve where it has not been seen for long. Only if the
  // drafts are good enough for the curve to matter, and for an `allowance` in tokens. Whether there is such a step.
  bool more_to_time(const LiveCurve& curve, const std::vector<double>& added, double allowance);

  // By draft.
  const std::vector<size_t>& counts() const { return counts_; }

 private:
  struct Candidate {
    double chance;
    size_t draft;
  };

  std::vector<size_t> counts_;
  std::vector<Candidate> candidates_;  // all tokens, the likeliest first; ties go by draft
  size_t admitted_ = 0;
};

}  // namespace tenfold::speculation
