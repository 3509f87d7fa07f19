#include "team.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tenfold {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// Within a step a thread spins this long before it parks: longer than any imbalance, and than most preemptions.
constexpr microseconds kPhaseSpin{1000};
// Between steps the core belongs to whoever prepares the next one.
constexpr microseconds kIdleSpin{5};
// A wait that is longer than this is a stall: somebody has no core.
constexpr microseconds kStall{100};
// Stalls up to this much in a step are forgiven; beyond it they may make up a third of the step.
constexpr microseconds kForgiven{1000};
// For how long a smaller team goes on before the full one is tried again: doubled as long as that fails.
constexpr milliseconds kShortPatience{50}, kLongPatience{1600};

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `word` differs from `old`, then sleeps until it does.
void await_change(std::atomic<uint32_t>& word, uint32_t old, microseconds spin) {
  for (int i = 0; i < 64; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
  }
  const auto until = std::chrono::steady_clock::now() + spin;
  while (std::chrono::steady_clock::now() < until)
    for (int i = 0; i < 16; ++i) {
      if (word.load(std::memory_order_acquire) != old) return;
      relax();
    }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(int threads)
    : capacity_(threads),
      process_(getpid()),
      active_(threads),
      patience_(kShortPatience),
      tickets_(new Ticket[static_cast<size_t>(threads)]) {
  try {
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { loop(i); });
  } catch (...) {  // the system gives no more threads: those that run must not outlive the team
    dismiss();
    throw;
  }
}

Team::~Team() { dismiss(); }

bool Team::here() const { return getpid() == process_; }

void Team::dismiss() {
  if (!here()) {
    // A forked child: there is nobody to wait for, and the handles can be neither joined nor detached.
    new std::vector<std::thread>(std::move(threads_));
    return;
  }
  stop_.store(1, std::memory_order_relaxed);
  for (int i = 1; i <= static_cast<int>(threads_.size()); ++i) {
    tickets_[static_cast<size_t>(i)].word.fetch_add(1, std::memory_order_release);
    tickets_[static_cast<size_t>(i)].word.notify_one();
  }
  for (auto& thread : threads_) thread.join();
}

// Chooses who takes part. Whoever was let go and has not left yet is not ready for another task.
void Team::enlist() {
  const int wanted = fixed_ > 0 ? fixed_ : began_ >= retry_at_ ? capacity_ : active_;
  active_ = 1;
  while (active_ < wanted) {
    const std::atomic<bool>& leaving = tickets_[static_cast<size_t>(active_)].leaving;
    while (leaving.load(std::memory_order_acquire) && fixed_ > 0) std::this_thread::yield();
    if (leaving.load(std::memory_order_acquire)) return;
    ++active_;
  }
}

void Team::run(Task task, void* context) {
  began_ = Clock::now();
  enlist();
  stalled_ = {};
  awake_ = false;
  task_ = task;
  context_ = context;
  const int wanted = active_;
  for (int i = 1; i < wanted; ++i) {
    tickets_[static_cast<size_t>(i)].word.fetch_add(1, std::memory_order_release);
    tickets_[static_cast<size_t>(i)].word.notify_one();
  }
  task(context, 0);
  barrier(0);
  if (active_ == capacity_) patience_ = kShortPatience;
}

// Whoever comes last sees for how long the first one has waited, decides who goes on, and opens the next phase.
bool Team::meet(int index) {
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  const int expected = active_;  // before arriving: whoever comes last may have the team changed at once
  const auto now = Clock::now().time_since_epoch().count();
  Clock::rep nobody = 0;
  first_arrival_.compare_exchange_strong(nobody, now, std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == expected) {
    reconsider(Clock::duration(now - first_arrival_.load(std::memory_order_relaxed)));
    first_arrival_.store(0, std::memory_order_relaxed);
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
  } else {
    await_change(phase_, phase, kPhaseSpin);
  }
  std::atomic<bool>& leaving = tickets_[static_cast<size_t>(index)].leaving;
  if (!leaving.load(std::memory_order_acquire)) return true;
  leaving.store(false, std::memory_order_release);
  return false;
}

void Team::reconsider(Clock::duration waited) {
  // Everybody's first barrier of a task also waits for those who slept to wake up, which says nothing of the cores.
  if (!std::exchange(awake_, true) || waited < kStall || fixed_ > 0) return;
  stalled_ += waited;
  const Clock::time_point now = Clock::now();
  if (stalled_ < kForgiven + (now - began_) / 3) return;
  const int before = active_;
  active_ = std::max(1, active_ / 2);
  for (int i = active_; i < before; ++i)
    tickets_[static_cast<size_t>(i)].leaving.store(true, std::memory_order_relaxed);
  stalled_ = {};
  retry_at_ = now + patience_;
  patience_ = std::min<Clock::duration>(patience_ * 2, kLongPatience);
  shrinks_.fetch_add(1, std::memory_order_relaxed);
}

void Team::loop(int index) {
  std::atomic<uint32_t>& ticket = tickets_[static_cast<size_t>(index)].word;
  for (uint32_t seen = 0;; ++seen) {
    await_change(ticket, seen, kIdleSpin);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (task_(context_, index)) barrier(index);
  }
}

}  // namespace tenfold
