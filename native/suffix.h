// Where the newest tokens of a text stood before: a window of tokens, searched by the longest context.
//
// A ring of tokens, as in LZ77. For each of a few lengths of context a hash says where a token last followed such a
// context, and every place says where before that: so a place costs the same to index whatever the text is, and the
// newest places are found first. What the ring overwrites is forgotten by age alone: a place that is too old, or that
// turns out to stand behind other tokens, is no match. Nothing is ever searched for or removed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "memory.h"

namespace tenfold {

class SuffixWindow {
 public:
  // Lengths of context that are hashed. Longer matches are found by comparing, up to kLongest tokens.
  static constexpr std::array<int, 5> kOrders{1, 2, 3, 5, 8};
  static constexpr int kLongest = 32;
  // Of one context length at most so many places are looked at, and shorter contexts only while there are few matches.
  static constexpr int kVisits = 32, kEnough = 16;
  static constexpr int32_t kNone = -1;

  struct Match {
    uint32_t place;  // of the token that followed
    int32_t length;  // tokens before it that agree with the context
  };

  // Room for so many tokens, rounded up to a power of two of at least 64; the oldest kLongest are context alone. Throws
  // std::invalid_argument, std::bad_alloc.
  explicit SuffixWindow(size_t tokens);

  // What follows is another text.
  void separate();

  // `indexed`: the token may be found as a continuation; else it is context for later ones.
  void append(int32_t token, uint32_t scope, bool indexed);

  // Places where a token followed the end of the context, longest match first, of equal ones the newest first (but for
  // the limits above). `newest` points behind the context's last token; returns how many were written.
  int find(const int32_t* newest, int count, uint32_t scope, Match* out, int room) const;

  // The token at a place that `find` gave, or behind one that this gave; kNone behind the end of its text.
  int32_t token(uint32_t place) const { return place == end_ ? kNone : cells_[place & mask_].token; }

  uint32_t end() const { return end_; }
  size_t capacity() const { return mask_ + size_t{1}; }
  size_t bytes() const { return memory_.size(); }

 private:
  struct Cell {
    int32_t token;
    uint32_t scope;
  };
  using Slots = std::array<uint32_t, kOrders.size()>;

  bool alive(uint32_t place) const { return end_ - place - 1 < reach_; }
  uint32_t& head(size_t order, uint32_t slot) const { return heads_[order * capacity() + slot]; }
  int agreement(const int32_t* newest, int count, uint32_t place) const;
  template <class Token>
  int slots(Token token, int count, uint32_t scope, Slots& out) const;

  Mapping memory_;
  uint32_t mask_, reach_, end_;
  int shift_;
  Cell* cells_;      // [capacity]
  Slots* previous_;  // [capacity] the place before with the same context, for each order
  uint32_t* heads_;  // [orders][capacity] the newest place for a hash
};

}  // namespace tenfold
