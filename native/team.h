// A persistent team of threads with static shares of the work: they spin a little between phases, then park.
//
// Where other programs want the cores too, a thread that has parked, or was sent to sleep at its work, comes back only
// after the others' time slices: milliseconds, once or several times a step, for phases of microseconds. The team sees
// that in the time its threads wait for one another; where fewer of them would be faster, fewer run, for a while.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace tenfold {

// Half-open range of items.
struct Range {
  int begin, end;
};

// The share of `items` that thread `index` of `count` has: contiguous, sizes differ by at most one.
inline Range share(int items, int index, int count) {
  const int64_t n = items;
  return {static_cast<int>(n * index / count), static_cast<int>(n * (index + 1) / count)};
}

using Clock = std::chrono::steady_clock;

// All threads must pass before one goes on. Waiting spins for a few microseconds, which is what a phase usually needs,
// and then sleeps in the kernel, so that a team on a busy machine leaves its cores to whoever holds it up.
class Barrier {
 public:
  // Threads that must meet; not while any of them waits.
  void set_count(int count) { count_ = count; }
  void wait();
  // How long the threads slept here, all together, since the last call.
  Clock::duration take_slept() { return Clock::duration(slept_.exchange(0, std::memory_order_relaxed)); }

 private:
  int count_ = 1;
  alignas(64) std::atomic<int> waiting_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<Clock::rep> slept_{0};
};

// How many threads the next run is worth.
class Width {
 public:
  explicit Width(int size) : size_(size), width_(size) {}
  // For a run that starts now.
  int choose(Clock::time_point now);
  // What the run took, and how long its threads slept, all together, waiting for one another.
  void learn(Clock::time_point now, Clock::duration taken, Clock::duration slept);

 private:
  const int size_;
  int width_;
  bool doubtful_ = false;      // the run before this one would have been faster with half its threads
  Clock::duration lost_{0};    // in such runs, since all threads last ran well
  Clock::time_point until_{};  // fewer threads run until then
};

class Team {
 public:
  // A task is called once on each thread, with the thread's index.
  using Task = void (*)(void* context, int index);

  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Chooses how many threads the next run has; what is prepared for it may depend on that.
  void begin();
  // All runs from now on have this many threads; 0: as many as pay.
  void fix(int threads) { fixed_ = threads; }
  // Threads of the run, of which `begin` was the start.
  int size() const { return running_; }
  // Runs the task on `size` threads, the caller being thread 0; returns when all are done. One caller at a time.
  void run(Task task, void* context);
  // To be called by every thread within a task.
  void barrier() {
    if (running_ > 1) barrier_.wait();
  }
  // Whether this is the process that made the team: after a fork the child has none of its threads.
  bool here() const;

 private:
  struct alignas(64) Turn {
    std::atomic<uint32_t> number{0};
  };

  void loop(int index);
  void dismiss();

  const int size_;
  const int64_t process_;
  int running_, fixed_ = 0;
  Width width_;
  Barrier barrier_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<int> stop_{0};
  std::unique_ptr<Turn[]> turns_;  // a thread's number changes when it has a task, or is to stop
  std::vector<std::thread> threads_;
};

}  // namespace tenfold
