#include "bandwidth.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "memory.h"
#include "team.h"

namespace tenfold {
namespace {

struct Read {
  const uint64_t* data;
  size_t words;
  int threads;
  std::vector<uint64_t> sums;

  static bool run(void* self, int index) {
    Read& r = *static_cast<Read*>(self);
    const size_t each = r.words / static_cast<size_t>(r.threads);
    const uint64_t* p = r.data + each * static_cast<size_t>(index);
    uint64_t a[8] = {};
    for (size_t i = 0; i + 8 <= each; i += 8)
      for (size_t j = 0; j < 8; ++j) a[j] += p[i + j];
    for (uint64_t x : a) r.sums[static_cast<size_t>(index) * 8] += x;
    return true;
  }
};

struct Multiply {
  const Kernels& kernels;
  int rounds;
  std::vector<int64_t> done;
  std::vector<int32_t> results;

  static bool run(void* self, int index) {
    Multiply& m = *static_cast<Multiply*>(self);
    const size_t i = static_cast<size_t>(index) * 16;  // a cache line each
    m.done[i] = m.kernels.dot_products(m.rounds, &m.results[i]);
    return true;
  }
};

}  // namespace

double dot_product_peak(const Kernels& kernels, int threads, int repeats) {
  constexpr int kRounds = 1 << 20;
  const size_t slots = static_cast<size_t>(threads) * 16;
  Multiply multiply{kernels, kRounds, std::vector<int64_t>(slots), std::vector<int32_t>(slots)};
  Team team(threads);
  team.fix(threads);
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    team.run(Multiply::run, &multiply);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    int64_t done = 0;
    for (int64_t count : multiply.done) done += count;
    best = std::max(best, static_cast<double>(done) / taken.count());
  }
  return best;
}

double read_bandwidth(int threads, size_t bytes, int repeats) {
  Mapping memory(bytes);
  uint64_t* words = reinterpret_cast<uint64_t*>(memory.data());
  const size_t count = memory.size() / 8;
  for (size_t i = 0; i < count; ++i) words[i] = i;
  Team team(threads);
  Read read{words, count, threads, std::vector<uint64_t>(static_cast<size_t>(threads) * 8)};
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    team.run(Read::run, &read);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(memory.size()) / taken.count());
  }
  // The sums must be seen to be used.
  return read.sums[0] == 1 ? 0.0 : best;
}

}  // namespace tenfold
