// A persistent team of threads with static shares of the work: they spin a little between phases, then park.
//
// A team whose threads do not all get a core (a busy machine) waits at every barrier for the one that has none, and a
// step of a hundred barriers would take a hundred time slices. So a team watches what it waits: when that outweighs
// the work, it goes on with half its threads, within the same task, and tries the full team again later. Shares do
// not change what is computed, only by whom.
#pragma once

#include <sys/types.h>

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

class Team {
 public:
  // A task is called once on each thread that takes part, with the thread's index. It returns false as soon as a
  // barrier returned false, else true.
  using Task = bool (*)(void* context, int index);

  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // For whoever shares the team: takes it for a while, or finds it taken. What is taken is given back.
  bool take() { return !taken_.exchange(true, std::memory_order_acquire); }
  void give_back() { taken_.store(false, std::memory_order_release); }
  int capacity() const { return capacity_; }
  // Threads that take part at the moment. Within a task it changes at barriers alone.
  int size() const { return active_; }
  // Whether this is the process that made the team: after a fork the child has none of its threads.
  bool here() const;
  // Runs the task, the caller being thread 0; returns when all who took part are done. One caller at a time.
  void run(Task task, void* context);
  // To be called by every thread within a task. False: this thread is let go and must leave the task at once.
  bool barrier(int index) { return active_ == 1 || meet(index); }
  // All runs from now on have this many threads, come what may; 0: as many as pay. Between runs.
  void fix(int threads) { fixed_ = threads; }
  // How often a team went on with fewer threads.
  uint64_t shrinks() const { return shrinks_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;
  // A thread sleeps on its own ticket: one more for each task that it takes part in. Once it is let go it says so
  // itself, for it may sleep until long after the task's end.
  struct alignas(64) Ticket {
    std::atomic<uint32_t> word{0};
    std::atomic<bool> leaving{false};
  };

  bool meet(int index);
  void reconsider(Clock::duration waited);
  void enlist();
  void loop(int index);
  void dismiss();

  const int capacity_;
  const pid_t process_;
  int active_, fixed_ = 0;
  bool awake_ = false;  // all have met once in this task
  Task task_ = nullptr;
  void* context_ = nullptr;
  Clock::time_point began_, retry_at_{};
  Clock::duration stalled_{}, patience_;
  std::atomic<uint64_t> shrinks_{0};
  std::atomic<bool> taken_{false};

  alignas(64) std::atomic<int> arrived_{0};
  std::atomic<Clock::rep> first_arrival_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int> stop_{0};
  std::unique_ptr<Ticket[]> tickets_;
  std::vector<std::thread> threads_;
};

}  // namespace tenfold
