#include "speculation/admission.h"

#include <algorithm>
#include <optional>

namespace tenfold::speculation {
namespace {

// Drafts are timed for the curve's sake only if their tokens stand with such a chance on average.
constexpr double kWorthTiming = 0.2;

}  // namespace

double Admission::admit(const std::vector<Weighed>& best, const std::vector<double>& added) {
  counts_.assign(best.size(), 0);
  candidates_.clear();
  for (size_t i = 0; i < best.size(); ++i)
    for (const double chance : best[i].chances) candidates_.push_back({chance, i});
  if (best.size() > 1)
    std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
      return a.chance != b.chance ? a.chance > b.chance : a.draft < b.draft;
    });
  // More are of no use here or later.
  if (candidates_.size() > added.size() - 1) candidates_.resize(added.size() - 1);
  double gain = 0, most = 0;
  admitted_ = 0;
  for (size_t k = 0; k < candidates_.size(); ++k) {
    gain += candidates_[k].chance;
    if (gain - added[k + 1] > most) {
      most = gain - added[k + 1];
      admitted_ = k + 1;
    }
  }
  for (size_t k = 0; k < admitted_; ++k) ++counts_[candidates_[k].draft];
  return most;
}

bool Admission::more_to_time(const LiveCurve& curve, const std::vector<double>& added, double allowance) {
  const auto rows = [n = counts_.size()](size_t drafted) { return static_cast<int>(n + drafted); };
  if (!curve.to_look_at(rows(admitted_), rows(added.size() - 1))) return false;
  size_t most = candidates_.size();
  while (most > admitted_ && added[most] - added[admitted_] > allowance) --most;
  const std::optional<int> wanted = curve.to_look_at(rows(admitted_), rows(most));
  if (!wanted) return false;
  const size_t end = std::min(static_cast<size_t>(*wanted) - counts_.size(), candidates_.size());
  double chances = 0;
  for (size_t k = admitted_; k < end; ++k) chances += candidates_[k].chance;
  if (chances < kWorthTiming * static_cast<double>(end - admitted_)) return false;
  for (size_t k = admitted_; k < end; ++k) ++counts_[candidates_[k].draft];
  return true;
}

}  // namespace tenfold::speculation
