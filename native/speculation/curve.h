// A cost curve that is kept true by the steps themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace tenfold::speculation {

// Log time at the curve's row counts ("nodes"), corrected by every step.
//
// What a step took beyond its estimate moves the two nodes around its rows, by a decayed mean. It moves nodes that have
// not been seen for long as well, because what changes mostly changes all (a busy machine, deeper contexts); nodes seen
// lately know better. A residual is cut at four times the usual one, so an outlier does little; less so where a node is
// trusted little, and no more at the third in a row, so a real change comes through in a few steps.
class LiveCurve {
 public:
  // Where it starts: row counts, ascending from 1, two or more, and milliseconds, positive. Throws
  // std::invalid_argument.
  LiveCurve(const std::vector<int>& rows, const std::vector<double>& ms);

  // Milliseconds of a step of so many rows (1 or more).
  double at(int rows) const;

  // Milliseconds that 0, 1 ... `most` rows more add to a step of `rows`; does not fall. Written to `added`.
  void beyond(int rows, int most, std::vector<double>& added) const;

  // The row count above `rows` and up to `most` of which a step would tell most: at a node that was never seen, or not
  // for long, or surprised when it was, or as near to it as may be. None if all are known well.
  std::optional<int> to_look_at(int rows, int most) const;

  // Whether what a step of so many rows takes has become a guess: unseen while others moved.
  bool doubtful(int rows) const;

  // A step of `rows` rows took so long. Steps far beyond the curve (long prompts) say nothing.
  void observe(int rows, double step_ms);

 private:
  struct Node {
    int rows;
    double log, ms, trust;
    int64_t seen = 0;  // the step
    bool looked = false;
    double missed = 0;  // what others moved by since
    int surprises = 0;  // on end, with the sign of their side
  };
  // The node below and the share of the one above.
  struct Place {
    size_t below;
    double share;
  };

  Place around(int rows) const;
  void see(Node& node, double move, double share);

  std::vector<Node> nodes_;
  std::vector<Place> places_;  // by the number of rows, below the last node's
  double usual_ = 0.03;
  int64_t step_ = 0;
};

}  // namespace tenfold::speculation
