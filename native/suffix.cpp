#include "suffix.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

namespace tenfold {
namespace {

constexpr uint64_t kMix = 0x9E3779B97F4A7C15ull;

size_t checked(size_t tokens) {
  if (tokens == 0 || tokens > (size_t{1} << 30)) throw std::invalid_argument("window: tokens must be 1 to 2^30");
  return std::bit_ceil(std::max<size_t>(tokens, 2 * SuffixWindow::kLongest));
}

}  // namespace

SuffixWindow::SuffixWindow(size_t tokens)
    : memory_(checked(tokens) * (sizeof(Cell) + sizeof(Slots) + kOrders.size() * sizeof(uint32_t))),
      mask_(static_cast<uint32_t>(checked(tokens) - 1)),
      reach_(mask_ + 1 - kLongest),
      end_(mask_ + 1),  // so that an untouched slot, which says 0, is too old
      shift_(64 - std::countr_zero(mask_ + 1)) {
  cells_ = reinterpret_cast<Cell*>(memory_.data());
  previous_ = reinterpret_cast<Slots*>(cells_ + capacity());
  heads_ = reinterpret_cast<uint32_t*>(previous_ + capacity());
  separate();
}

void SuffixWindow::separate() {
  cells_[end_ & mask_] = {kNone, 0};
  ++end_;
}

// Slots of the contexts whose tokens, newest first, are token(0), token(1) ...; returns for how many orders.
template <class Token>
int SuffixWindow::slots(Token token, int count, uint32_t scope, Slots& out) const {
  uint64_t hash = (scope + 1) * kMix;
  int order = 0;
  for (int i = 0; i < std::min(count, kOrders.back()); ++i) {
    const int32_t t = token(i);
    if (t == kNone) break;
    hash = (hash ^ static_cast<uint32_t>(t)) * kMix;
    hash ^= hash >> 29;
    if (i + 1 == kOrders[static_cast<size_t>(order)])
      out[static_cast<size_t>(order++)] = static_cast<uint32_t>((hash * kMix) >> shift_);
  }
  return order;
}

void SuffixWindow::append(int32_t token, uint32_t scope, bool indexed) {
  if (indexed) {
    Slots slot;
    const int orders = slots([&](int i) { return cells_[(end_ - 1 - static_cast<uint32_t>(i)) & mask_].token; },
                             kOrders.back(), scope, slot);
    Slots& before = previous_[end_ & mask_];
    for (size_t o = 0; o < static_cast<size_t>(orders); ++o) {
      before[o] = head(o, slot[o]);
      head(o, slot[o]) = end_;
    }
  }
  cells_[end_ & mask_] = {token, scope};
  ++end_;
}

int SuffixWindow::agreement(const int32_t* newest, int count, uint32_t place) const {
  const int limit = std::min(count, kLongest);
  int length = 0;
  while (length < limit && cells_[(place - 1 - static_cast<uint32_t>(length)) & mask_].token == newest[-1 - length])
    ++length;
  return length;
}

int SuffixWindow::find(const int32_t* newest, int count, uint32_t scope, Match* out, int room) const {
  Slots slot;
  const int orders = slots([&](int i) { return newest[-1 - i]; }, count, scope, slot);
  for (size_t o = 0; o < static_cast<size_t>(orders); ++o) __builtin_prefetch(&head(o, slot[o]));
  int found = 0;
  for (int o = orders - 1; o >= 0 && found < std::min(room, kEnough); --o) {
    const size_t order = static_cast<size_t>(o);
    // Longer matches stand in the chain of the next order, and were found there.
    const int most = order + 1 < kOrders.size() ? kOrders[order + 1] - 1 : kLongest;
    const int first = found;
    uint32_t place = head(order, slot[order]);
    for (int visit = 0; visit < kVisits && found < room && alive(place); ++visit) {
      const uint32_t next = previous_[place & mask_][order];
      if (alive(next)) {
        __builtin_prefetch(&previous_[next & mask_]);
        __builtin_prefetch(&cells_[next & mask_]);
      }
      const int length = agreement(newest, count, place);
      if (length >= kOrders[order] && length <= most && cells_[place & mask_].scope == scope)
        out[found++] = {place, length};
      if (end_ - next <= end_ - place) break;  // not older: the count of places has wrapped since
      place = next;
    }
    std::sort(out + first, out + found, [&](const Match& a, const Match& b) {
      return a.length != b.length ? a.length > b.length : end_ - a.place < end_ - b.place;
    });
  }
  return found;
}

}  // namespace tenfold
