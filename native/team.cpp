#include "team.h"

#include <unistd.h>

#include <algorithm>
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

// Whether `word` differs from `old`, now or after some spins.
bool changes(const std::atomic<uint32_t>& word, uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (word.load(std::memory_order_acquire) != old) return true;
    relax();
  }
  return false;
}

// Sleeps until `word` differs from `old`.
void sleep_until_changed(const std::atomic<uint32_t>& word, uint32_t old) {
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

constexpr int kPhaseSpins = 2000;  // some tens of microseconds: longer than any imbalance within a step
constexpr int kIdleSpins = 200;    // between steps the core belongs to whoever prepares the next one
constexpr int kHold = 20;          // fewer threads run for this many times what was lost in finding out: 5 %

}  // namespace

void Barrier::wait() {
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  const int count = count_;  // before the arrival: after it, the others may be on to a run of another size
  if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
    waiting_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
  } else if (!changes(phase_, phase, kPhaseSpins)) {
    const Clock::time_point start = Clock::now();
    sleep_until_changed(phase_, phase);
    slept_.fetch_add((Clock::now() - start).count(), std::memory_order_relaxed);
  }
}

int Width::choose(Clock::time_point now) {
  if (width_ < size_ && now >= until_) {
    width_ = size_;
    lost_ = Clock::duration::zero();
  }
  return width_;
}

void Width::learn(Clock::time_point now, Clock::duration taken, Clock::duration slept) {
  // Half the threads would have needed twice the time that each of these worked.
  if (width_ == 1 || slept * 2 <= taken * width_) {
    doubtful_ = false;
    if (width_ == size_) lost_ = Clock::duration::zero();
    return;
  }
  lost_ += taken;
  // Once may be chance; twice in a row, the cores are busy.
  if (std::exchange(doubtful_, !doubtful_)) {
    width_ /= 2;
    until_ = now + lost_ * kHold;
  }
}

Team::Team(int threads)
    : size_(threads), process_(getpid()), running_(threads), width_(threads), turns_(new Turn[threads]) {
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
  for (int i = 1; i < size_; ++i) {
    turns_[i].number.fetch_add(1, std::memory_order_release);
    turns_[i].number.notify_one();
  }
  for (auto& thread : threads_) thread.join();
}

void Team::begin() {
  running_ = size_ == 1 ? 1 : fixed_ > 0 ? fixed_ : width_.choose(Clock::now());
  barrier_.set_count(running_);
}

void Team::run(Task task, void* context) {
  if (running_ == 1) {
    task(context, 0);
    return;
  }
  const Clock::time_point start = Clock::now();
  task_ = task;
  context_ = context;
  for (int i = 1; i < running_; ++i) {
    turns_[i].number.fetch_add(1, std::memory_order_release);
    turns_[i].number.notify_one();
  }
  task(context, 0);
  barrier_.wait();
  const Clock::time_point end = Clock::now();
  const Clock::duration slept = barrier_.take_slept();
  if (fixed_ == 0) width_.learn(end, end - start, slept);
}

void Team::loop(int index) {
  const std::atomic<uint32_t>& number = turns_[index].number;
  for (uint32_t last = 0;; ++last) {
    if (!changes(number, last, kIdleSpins)) sleep_until_changed(number, last);
    if (stop_.load(std::memory_order_relaxed)) return;
    task_(context_, index);
    barrier_.wait();
  }
}

}  // namespace tenfold
