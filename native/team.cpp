#include "team.h"

#include <unistd.h>

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tenfold {
namespace {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `word` differs from `old`, then sleeps until it does.
void await_change(std::atomic<uint32_t>& word, uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

constexpr int kPhaseSpins = 2000;  // some tens of microseconds: longer than any imbalance within a step
constexpr int kIdleSpins = 200;    // between steps the core belongs to whoever prepares the next one

}  // namespace

void Barrier::wait() {
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    waiting_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
  } else {
    await_change(phase_, phase, spins_);
  }
}

Team::Team(int threads) : size_(threads), process_(getpid()), barrier_(threads, kPhaseSpins) {
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
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(Task task, void* context) {
  if (size_ == 1) {
    task(context, 0);
    return;
  }
  task_ = task;
  context_ = context;
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  task(context, 0);
  barrier_.wait();
}

void Team::loop(int index) {
  uint32_t round = 0;
  for (;;) {
    await_change(round_, round, kIdleSpins);
    round = round_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    task_(context_, index);
    barrier_.wait();
  }
}

}  // namespace tenfold
