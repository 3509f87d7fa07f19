#include "speculation/acceptance.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace tenfold::speculation {
namespace {

// Upper ends of the classes of claims, and their middles.
constexpr std::array<double, Calibration::kClasses - 1> kClaims{0.2, 0.4, 0.6, 0.8, 0.95};
constexpr std::array<double, Calibration::kClasses> kMiddles{0.1, 0.3, 0.5, 0.7, 0.88, 0.98};
// A claim is believed as far as so many trials of a somewhat poorer drafter.
constexpr double kClaimWeight = 4, kClaimDiscount = 0.8;
// And a cell starts as so many trials of its class.
constexpr double kClassWeight = 6;
constexpr double kMostTrials = 128;
// Standard deviations that an estimate is lowered by.
constexpr double kCaution = 0.5;

}  // namespace

Calibration::Calibration(int qualities) {
  if (qualities < 1) throw std::invalid_argument("qualities: a drafter has one at least");
  cells_.resize(static_cast<size_t>(qualities) * kPositions * kClasses);
  refresh_all();
}

int Calibration::cell(int quality, int position, double claim) const {
  int k = 0;
  while (k < kClasses - 1 && !(claim < kClaims[static_cast<size_t>(k)])) ++k;
  return (quality * kPositions + std::min(position, kPositions - 1)) * kClasses + k;
}

void Calibration::Counts::add(bool stood) {
  hits += stood;
  trials += 1.0;
  if (trials > kMostTrials) {
    const double decay = kMostTrials / trials;
    hits *= decay;
    trials *= decay;
  }
}

void Calibration::add(int cell, bool stood) {
  cells_[static_cast<size_t>(cell)].add(stood);
  classes_[static_cast<size_t>(cell % kClasses)].add(stood);
  if (--until_refresh_) {
    refresh(cell);
  } else {
    // Cells without trials of their own follow their class: soon at first, seldom later.
    refreshes_ = std::min(refreshes_ + 1, 128);
    until_refresh_ = 4 * refreshes_;
    refresh_all();
  }
}

void Calibration::refresh_all() {
  for (int i = 0; i < cells(); ++i) refresh(i);
}

void Calibration::refresh(int index) {
  const auto k = static_cast<size_t>(index % kClasses);
  Cell& cell = cells_[static_cast<size_t>(index)];
  const double class_trials = classes_[k].trials + kClaimWeight;
  const double prior = (classes_[k].hits + kClaimWeight * kClaimDiscount * kMiddles[k]) / class_trials;
  const double trials = cell.trials + kClassWeight;
  cell.mean = (cell.hits + kClassWeight * prior) / trials;
  cell.low = std::max(0.0, cell.mean - kCaution * std::sqrt(cell.mean * (1.0 - cell.mean) / trials));
}

void Odds::add(double chance, bool stood) {
  came_ = came_ * decay_ + stood;
  expected_ = expected_ * decay_ + chance;
  failed_ = failed_ * decay_ + !stood;
  failing_ = failing_ * decay_ + 1.0 - chance;
  update();
}

void Odds::fade(double kept) {
  came_ *= kept;
  expected_ *= kept;
  failed_ *= kept;
  failing_ *= kept;
  update();
}

void Odds::update() {
  factor_ = ((came_ + prior_) * (failing_ + prior_)) / ((expected_ + prior_) * (failed_ + prior_));
}

void Blend::add(double common, double own, bool stood) {
  const double apart = own - common;
  gained_ = gained_ * decay_ + (stood - common) * apart;
  spread_ = spread_ * decay_ + apart * apart;
  share_ = spread_ > 1e-9 ? std::min(std::max(gained_ / spread_, 0.0), 1.0) : 0.0;
}

}  // namespace tenfold::speculation
