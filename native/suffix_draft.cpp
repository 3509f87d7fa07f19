#include "suffix_draft.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace tenfold {
namespace {

constexpr int32_t kNone = SuffixWindow::kNone;
// How many guesses the prior counts for, and the count from which on older ones fade.
constexpr float kPriorWeight = 16, kFade = 4096;
constexpr int kRoom = 32, kReseeds = 3;

int weight(int length) { return length * length * length; }

int length_class(int length) {
  constexpr std::array<int, SuffixRecord::kLengths - 1> least{2, 3, 4, 6, 9, 16, 32};
  return static_cast<int>(std::upper_bound(least.begin(), least.end(), length) - least.begin());
}

// A single witness; then less than half of the votes, less than 4 in 5, less than all, all of them.
int share_class(int votes, int won, int all) {
  if (votes == 1) return 0;
  if (won == all) return 4;
  return 2 * won < all ? 1 : 5 * won < 4 * all ? 2 : 3;
}

int bucket_of(int source, int other, int length, int share) {
  return ((source * SuffixRecord::kOthers + other) * SuffixRecord::kLengths + length_class(length)) *
             SuffixRecord::kShares +
         share;
}

// Negative numbers mark the ends of texts.
void check(const std::vector<int32_t>& tokens) {
  for (const int32_t token : tokens)
    if (token < 0) throw std::invalid_argument("token " + std::to_string(token) + " is negative");
}

}  // namespace

void SuffixRecord::add(SuffixRecord& from) {
  for (size_t b = 0; b < counts.size(); ++b) {
    Counts& c = counts[b];
    c.right += from.counts[b].right;
    c.seen += from.counts[b].seen;
    if (c.seen > kFade) {
      c.right *= kFade / 2 / c.seen;
      c.seen = kFade / 2;
    }
  }
  from.counts = {};
}

SuffixTraffic::SuffixTraffic(size_t tokens, std::vector<float> prior) : window_(tokens), prior_(std::move(prior)) {
  if (prior_.size() != SuffixRecord::kBuckets)
    throw std::invalid_argument("prior: has " + std::to_string(prior_.size()) + " chances, expected " +
                                std::to_string(SuffixRecord::kBuckets));
  known_.resize(std::max<size_t>(64, 2 * window_.capacity() / kBlock), {0, 0});
}

size_t SuffixTraffic::learn(const std::vector<int32_t>& text, uint32_t scope) {
  check(text);
  uint64_t chain = (scope + 1) * 0x9E3779B97F4A7C15ull;
  std::vector<uint64_t> chains;
  size_t start = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    chain = (chain ^ static_cast<uint32_t>(text[i])) * 0xD6E8FEB86659FD93ull;
    chain ^= chain >> 32;
    if ((i + 1) % kBlock != 0) continue;
    const Known& known = known_[chain & (known_.size() - 1)];
    // Known in the newer half of the ring alone: what keeps coming is indexed anew before it goes.
    if (start == i + 1 - kBlock && known.hash == chain && window_.end() - known.place < window_.capacity() / 2)
      start = i + 1;
    chains.push_back(chain);
  }
  if (start == text.size()) return 0;
  window_.separate();
  for (size_t i = start - std::min<size_t>(start, SuffixWindow::kLongest); i < text.size(); ++i) {
    window_.append(text[i], scope, i >= start);
    if (i >= start && (i + 1) % kBlock == 0) {
      const uint64_t hash = chains[i / kBlock];
      known_[hash & (known_.size() - 1)] = {hash, window_.end()};
    }
  }
  return text.size() - start;
}

// Matches of one source, which follow the drafted tokens as long as they agree with them.
struct SuffixText::Pool {
  const SuffixWindow& window;
  bool own;
  std::array<SuffixWindow::Match, kRoom> matches;
  int size = 0;

  int32_t token(uint32_t place, const int32_t* drafted) const {
    const uint32_t beyond = place - window.end();  // the text itself goes on with what was drafted
    if (own && beyond < static_cast<uint32_t>(kMostDrafted)) return drafted[beyond];
    return window.token(place);
  }

  // Keeps the matches that agree with the token just drafted and go on behind it.
  void follow(int32_t picked, const int32_t* drafted) {
    int kept = 0;
    for (int i = 0; i < size; ++i) {
      const auto [place, length] = matches[static_cast<size_t>(i)];
      if (token(place, drafted) == picked && token(place + 1, drafted) != kNone)
        matches[static_cast<size_t>(kept++)] = {place + 1, std::min(length + 1, SuffixWindow::kLongest)};
    }
    size = kept;
  }

  Vote vote(const int32_t* drafted) const {
    struct Party {
      int32_t token;
      int votes, won, length;
    };
    std::array<Party, kRoom> parties;
    int count = 0, all = 0;
    for (int i = 0; i < size; ++i) {
      const auto [place, length] = matches[static_cast<size_t>(i)];
      const int32_t next = token(place, drafted);
      Party* party = std::find_if(parties.data(), parties.data() + count, [&](Party& p) { return p.token == next; });
      if (party == parties.data() + count) parties[static_cast<size_t>(count++)] = {next, 0, 0, length};
      ++party->votes;
      party->won += weight(length);
      all += weight(length);
    }
    if (count == 0) return {};
    // Of equals the first: it has the longest match, or the newest.
    const Party* best = std::max_element(parties.data(), parties.data() + count,
                                         [](const Party& a, const Party& b) { return a.won < b.won; });
    return {best->token, best->length, share_class(best->votes, best->won, all)};
  }
};

SuffixText::SuffixText(size_t expected, size_t most) : window_(std::min(expected, most)), most_(most) {}

void SuffixText::settle(int32_t token) {
  if (settled_ == expected_.size()) return;
  const Expected& e = expected_[settled_++];
  for (size_t source = 0; source < 2; ++source) {
    if (e.token[source] == kNone) continue;
    SuffixRecord::Counts& c = record_.counts[static_cast<size_t>(e.bucket[source])];
    c.seen += 1;
    if (e.token[source] == token) c.right += 1;
  }
  if (e.picked != token) settled_ = expected_.size();
}

void SuffixText::extend(const std::vector<int32_t>& tokens) {
  check(tokens);
  for (const int32_t token : tokens) {
    settle(token);
    if (indexed_ + SuffixWindow::kLongest + 2 > window_.capacity() && window_.capacity() < most_) {
      SuffixWindow larger(2 * window_.capacity());
      const uint32_t end = window_.end();
      for (uint32_t place = end - static_cast<uint32_t>(indexed_); place != end; ++place)
        larger.append(window_.token(place), 0, true);
      window_ = std::move(larger);
    }
    window_.append(token, 0, true);
    ++indexed_;
  }
}

float SuffixText::chance(int bucket, const std::vector<float>& prior, const SuffixRecord* shared) const {
  const size_t b = static_cast<size_t>(bucket);
  const SuffixRecord::Counts own = record_.counts[b];
  float right = kPriorWeight * prior[b] + own.right, seen = kPriorWeight + own.seen;
  if (shared != nullptr) {
    right += shared->counts[b].right;
    seen += shared->counts[b].seen;
  }
  return right / seen;
}

std::vector<SuffixText::Guess> SuffixText::propose(const SuffixTraffic& traffic, uint32_t scope,
                                                   const SuffixRecord* shared, int count, float floor) {
  std::vector<Guess> guesses;
  expected_.clear();
  settled_ = 0;
  count = std::min(count, kMostDrafted);

  // The newest tokens, and behind them what is drafted.
  std::array<int32_t, SuffixWindow::kLongest + kMostDrafted> text;
  int length = static_cast<int>(std::min<size_t>(indexed_, SuffixWindow::kLongest));
  for (int i = 0; i < length; ++i)
    text[static_cast<size_t>(i)] = window_.token(window_.end() - static_cast<uint32_t>(length - i));
  const int32_t* drafted = text.data() + length;

  std::array<Pool, 2> pools{Pool{window_, true, {}, 0}, Pool{traffic.window(), false, {}, 0}};
  std::array<int, 2> reseeds{kReseeds, kReseeds};
  float survival = 1;
  for (int i = 0; i < count; ++i) {
    std::array<Vote, 2> votes;
    for (size_t s = 0; s < 2; ++s) {
      Pool& pool = pools[s];
      if (i == 0 || (pool.size == 0 && reseeds[s]-- > 0))
        pool.size = pool.window.find(text.data() + length, length, s == 0 ? 0 : scope, pool.matches.data(), kRoom);
      votes[s] = pool.vote(drafted);
    }
    Expected e{kNone, {votes[0].token, votes[1].token}, {0, 0}};
    float best = 0;
    for (size_t s = 0; s < 2; ++s) {
      if (votes[s].token == kNone) continue;
      const int32_t other = votes[1 - s].token;
      const int bucket = bucket_of(static_cast<int>(s),
                                   other == kNone            ? 0
                                   : other == votes[s].token ? 1
                                                             : 2,
                                   votes[s].length, votes[s].share);
      e.bucket[s] = static_cast<int16_t>(bucket);
      const float chance = this->chance(bucket, traffic.prior(), shared);
      if (chance > best) {
        best = chance;
        e.picked = votes[s].token;
      }
    }
    survival *= best;
    if (e.picked == kNone || survival < floor) break;
    expected_.push_back(e);
    guesses.push_back({e.picked, survival});
    text[static_cast<size_t>(length++)] = e.picked;
    for (Pool& pool : pools) pool.follow(e.picked, drafted);
  }
  return guesses;
}

}  // namespace tenfold
