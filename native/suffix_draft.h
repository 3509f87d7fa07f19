// Guessing how a text goes on from where its newest tokens stood before: in itself, and in other texts.
//
// Every match votes for the token that followed it, a longer one with more weight. How often a vote of such a
// circumstance was right is counted while texts grow, so a guess comes with the chance that it stands.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "suffix.h"

namespace tenfold {

// How often guesses of each circumstance were right.
class SuffixRecord {
 public:
  // A circumstance: who guesses (the text itself, other texts), what the other one guesses (nothing, the same,
  // something else), how long the longest match behind the guess is, and its share of the votes.
  static constexpr int kSources = 2, kOthers = 3, kLengths = 8, kShares = 5;
  static constexpr int kBuckets = kSources * kOthers * kLengths * kShares;

  // Counts of `from`, which is emptied, are added. Old counts fade, so that traffic may change.
  void add(SuffixRecord& from);

  struct Counts {
    float right = 0, seen = 0;
  };
  std::array<Counts, kBuckets> counts{};
};

// Other texts, for all scopes: a scope sees its own alone. When it is full, the oldest tokens go.
class SuffixTraffic {
 public:
  // Repeated beginnings of texts are known in blocks of so many tokens.
  static constexpr size_t kBlock = 32;

  // `prior`: for each circumstance the chance assumed before anything was counted.
  SuffixTraffic(size_t tokens, std::vector<float> prior);

  // Indexes a text, but for the beginning that another of the scope had too. Returns how many tokens were indexed.
  size_t learn(const std::vector<int32_t>& text, uint32_t scope);

  const SuffixWindow& window() const { return window_; }
  const std::vector<float>& prior() const { return prior_; }
  size_t bytes() const { return window_.bytes() + known_.size() * sizeof(Known); }

 private:
  struct Known {
    uint64_t hash;
    uint32_t place;
  };

  SuffixWindow window_;
  std::vector<float> prior_;
  std::vector<Known> known_;  // beginnings, by their hash
};

// A text that grows.
class SuffixText {
 public:
  static constexpr int kMostDrafted = 32;

  struct Guess {
    int32_t token;
    float survival;  // the chance that it and all before it stand
  };

  // Keeps an index of at most so many of its newest tokens.
  SuffixText(size_t expected, size_t most);

  void extend(const std::vector<int32_t>& tokens);

  // At most `count` guesses; fewer where there is no match or where less than `floor` would survive. `shared`: the
  // counts of the scope, or null if it has none yet.
  std::vector<Guess> propose(const SuffixTraffic& traffic, uint32_t scope, const SuffixRecord* shared, int count,
                             float floor);

  SuffixRecord& record() { return record_; }
  size_t bytes() const { return window_.bytes(); }

 private:
  struct Vote {
    int32_t token = SuffixWindow::kNone;
    int length = 0, share = 0;
  };
  struct Pool;
  struct Expected {
    int32_t picked;
    std::array<int32_t, 2> token;
    std::array<int16_t, 2> bucket;
  };

  float chance(int bucket, const std::vector<float>& prior, const SuffixRecord* shared) const;
  void settle(int32_t token);

  SuffixWindow window_;
  size_t most_, indexed_ = 0;
  SuffixRecord record_;
  std::vector<Expected> expected_;  // what was guessed last, to be counted as the text grows
  size_t settled_ = 0;
};

}  // namespace tenfold
