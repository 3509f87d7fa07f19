#include "speculation/curve.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

namespace tenfold::speculation {
namespace {

// A node follows what is seen with a gain of 1 / (trust + 1), and trust ends here: about 16 steps back.
constexpr double kMostTrust = 15;
// What the start-up measurement counts for.
constexpr double kStartTrust = 6;
// After so many steps unseen, a node goes along with two thirds of what moves the others.
constexpr double kForgettingSteps = 48;
constexpr int kFreshSteps = 8;
// A node that was not seen while others moved so far (in log ms) is to be believed no more.
constexpr double kMissedTooMuch = 0.08;
constexpr int kStaleSteps = 256;
// A plain step is made to be timed no sooner than after so many others, even where times change all the time.
constexpr int kDoubtSteps = 48;
// A residual is cut at so many times the usual size (which is at least this, in log ms) ...
constexpr double kUsualTimes = 4, kLeastUsual = 0.01;
// ... but so many cut on end, to the same side, are no outliers.
constexpr int kSurprises = 3;
constexpr double kUsualRate = 0.03;
// Row counts are looked up in a table up to the last node.
constexpr int kMostRows = 1 << 20;

}  // namespace

LiveCurve::LiveCurve(const std::vector<int>& rows, const std::vector<double>& ms) {
  if (rows.size() < 2 || rows.size() != ms.size() || rows[0] != 1 || rows.back() > kMostRows)
    throw std::invalid_argument("rows: must ascend from 1, two or more, with one time each");
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i > 0 && rows[i] <= rows[i - 1]) throw std::invalid_argument("rows: must ascend");
    if (!(ms[i] > 0 && ms[i] < INFINITY)) throw std::invalid_argument("ms: must be positive and finite");
    nodes_.push_back({.rows = rows[i], .log = std::log(ms[i]), .ms = ms[i], .trust = kStartTrust});
  }
  places_.push_back({0, 0.0});
  for (size_t i = 0; i + 1 < rows.size(); ++i)
    for (int r = rows[i]; r < rows[i + 1]; ++r)
      places_.push_back({i, static_cast<double>(r - rows[i]) / static_cast<double>(rows[i + 1] - rows[i])});
}

double LiveCurve::at(int rows) const {
  rows = std::max(rows, 0);
  if (static_cast<size_t>(rows) < places_.size()) {
    const Place& place = places_[static_cast<size_t>(rows)];
    const double below = nodes_[place.below].ms;
    return below + (nodes_[place.below + 1].ms - below) * place.share;
  }
  const Node &last = nodes_.back(), &before = nodes_[nodes_.size() - 2];
  const double slope = (last.ms - before.ms) / (last.rows - before.rows);
  return last.ms + std::max(slope, 0.0) * (rows - last.rows);
}

// Beyond the last node, all of the last one.
LiveCurve::Place LiveCurve::around(int rows) const {
  const auto r = static_cast<size_t>(std::max(rows, 0));
  return r < places_.size() ? places_[r] : Place{nodes_.size() - 2, 1.0};
}

void LiveCurve::beyond(int rows, int most, std::vector<double>& added) const {
  const double first = at(rows);
  double most_yet = first;
  added.clear();
  added.push_back(0.0);
  for (int r = rows + 1; r <= rows + most; ++r) {
    most_yet = std::max(most_yet, at(r));
    added.push_back(most_yet - first);
  }
}

std::optional<int> LiveCurve::to_look_at(int rows, int most) const {
  int64_t oldest = step_ - kStaleSteps;
  std::optional<int> found;
  int below = 1;
  for (const Node& node : nodes_) {
    const int r = node.rows;
    // Rows that are nearer to the node below tell of that one.
    if (r > rows && (r <= most || 2 * int64_t{most} >= int64_t{r} + below)) {
      int64_t seen = node.seen;
      if (!node.looked || node.surprises != 0)
        seen -= kStaleSteps;
      else if (node.trust < 3)
        seen -= kStaleSteps / 2;
      if (seen < oldest) {
        oldest = seen;
        found = std::min(r, most);
      }
    }
    below = r;
  }
  return found;
}

bool LiveCurve::doubtful(int rows) const {
  const auto [i, share] = around(rows);
  const Node& near = nodes_[share > 0.5 ? i + 1 : i];
  const int64_t age = step_ - near.seen;
  return age > 2 * kStaleSteps || (age > kDoubtSteps && near.trust < 3);
}

void LiveCurve::observe(int rows, double step_ms) {
  if (rows > 2 * nodes_.back().rows || rows < 1 || !(step_ms > 0 && step_ms < INFINITY)) return;
  ++step_;
  const auto [i, share] = around(rows);
  Node &lower = nodes_[i], &upper = nodes_[i + 1];
  // A residual is put down to the two nodes around by their share in the estimate and their doubt.
  double below = (1.0 - share) / lower.trust, above = share / upper.trust;
  Node& near = above > below ? upper : lower;
  double residual = std::log(step_ms / at(rows));
  const double size = std::abs(residual);
  const double most = kUsualTimes * usual_ * (1.0 + 6.0 / (near.trust + 1.0));
  // The usual size follows slowly, and no single step may raise it much.
  usual_ += (std::min(size, kUsualTimes * usual_) - usual_) * kUsualRate;
  usual_ = std::max(usual_, kLeastUsual);
  if (size <= most) {
    near.surprises = 0;
  } else {
    const int sign = residual > 0.0 ? 1 : -1;
    near.surprises = near.surprises * sign > 0 ? near.surprises + sign : sign;
    if (std::abs(near.surprises) < kSurprises) {
      residual = most * sign;
    } else {
      // More of them say no more.
      near.surprises = kSurprises * sign;
      if (near.trust > 1.0) {
        near.trust = 1.0;
        below = (1.0 - share) / lower.trust;
        above = share / upper.trust;
      }
    }
  }
  const double total = (1.0 - share) * below + share * above + 1.0;
  if (share < 1.0) see(lower, residual * below / total, 1.0 - share);
  if (share > 0.0) see(upper, residual * above / total, share);
  // What a step moved the nodes around it by, others may have moved by unseen.
  const double move = residual * std::max(below, above) / total;
  for (Node& node : nodes_) {
    if ((&node == &lower && share < 1.0) || (&node == &upper && share > 0.0)) continue;
    node.missed += move;
    if (node.trust > 1.0 && std::abs(node.missed) > kMissedTooMuch) node.trust = 1.0;
    const int64_t age = step_ - node.seen;
    if (age > kFreshSteps) {
      node.log += move * (static_cast<double>(age) / (static_cast<double>(age) + kForgettingSteps));
      node.ms = std::exp(node.log);
    }
  }
}

// A step said that a node is to move, and had such a share in it.
void LiveCurve::see(Node& node, double move, double share) {
  node.log += move;
  node.ms = std::exp(node.log);
  node.trust = std::min(node.trust + share, kMostTrust);
  if (share >= 0.5) {
    node.seen = step_;
    node.looked = true;
    node.missed = 0.0;
  }
}

}  // namespace tenfold::speculation
