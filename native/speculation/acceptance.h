// Whether drafted tokens will stand: a drafter's own claims, corrected by what became of its drafts.
//
// A claim is the chance of a position given that all before it stand. Three corrections follow one another: counts by
// (quality, position, claim) over all traffic, then the odds by which a namespace departs from them, then those of the
// sequence. Only counts cross namespaces, never tokens.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace tenfold::speculation {

// Decayed counts of one drafter in cells of (quality, position, claim), each with its class of claims as prior (two
// levels of Beta means), and a bound that is lower than the mean by its standard deviation.
class Calibration {
 public:
  static constexpr int kPositions = 4, kClasses = 6;

  // Throws std::invalid_argument unless there is a quality.
  explicit Calibration(int qualities);

  int qualities() const { return static_cast<int>(cells_.size()) / (kPositions * kClasses); }
  int cells() const { return static_cast<int>(cells_.size()); }

  // The cell of a position claimed to stand with `claim`; `quality` is one there is, `position` not negative.
  int cell(int quality, int position, double claim) const;

  // A position of this cell was put to the test.
  void add(int cell, bool stood);

  // The chance that a position of the cell stands, given those before it; `low` with caution.
  double mean(int cell) const { return cells_[static_cast<size_t>(cell)].mean; }
  double low(int cell) const { return cells_[static_cast<size_t>(cell)].low; }

 private:
  struct Counts {
    double hits = 0, trials = 0;
    void add(bool stood);
  };
  struct Cell : Counts {
    double mean = 0, low = 0;
  };

  void refresh(int cell);
  void refresh_all();

  std::vector<Cell> cells_;
  std::array<Counts, kClasses> classes_;
  int until_refresh_ = 1, refreshes_ = 0;
};

// How much better or worse than expected drafts fare here (in a namespace, in a sequence): a factor on their odds, from
// decayed sums of what was expected and what came.
class Odds {
 public:
  // `memory`: trials it goes back. `prior`: trials as expected that it starts with.
  Odds(double memory, double prior) : decay_(1.0 - 1.0 / memory), prior_(prior) {}

  // A position that was thought to stand with `chance` did or did not.
  void add(double chance, bool stood);

  // Time went by without trials: keeps this share of what is known.
  void fade(double kept);

  double factor() const { return factor_; }

 private:
  void update();

  double decay_, prior_;
  double came_ = 0, expected_ = 0, failed_ = 0, failing_ = 0;
  double factor_ = 1;
};

// A chance with its odds multiplied.
inline double shifted(double chance, double odds) { return chance * odds / (1.0 - chance + chance * odds); }

// How far what is known of a sequence should be believed over what is known of its namespace: the share that would have
// predicted best so far, by decayed least squares. Where sequences are alike, what sets one apart is chance, and the
// share falls to 0; where they differ, it rises to 1.
class Blend {
 public:
  // `memory`: trials it goes back. `share`: at the start, with `weight`, a sum of squares.
  Blend(double memory, double share, double weight)
      : decay_(1.0 - 1.0 / memory), gained_(share * weight), spread_(weight), share_(share) {}

  // A position was thought to stand with chance `common` in the namespace and `own` in the sequence.
  void add(double common, double own, bool stood);

  double share() const { return share_; }

 private:
  double decay_, gained_, spread_, share_;
};

}  // namespace tenfold::speculation
