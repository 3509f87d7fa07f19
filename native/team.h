// A persistent team of threads with static shares of the work: they spin a little between phases, then park.
#pragma once

#include <atomic>
#include <cstdint>
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

// All threads must pass before one goes on. Waiting spins for a few microseconds, which is what a phase usually needs,
// and then sleeps in the kernel, so that a team on a busy machine leaves its cores to whoever holds it up.
class Barrier {
 public:
  Barrier(int count, int spins) : count_(count), spins_(spins), waiting_(0), phase_(0) {}
  void wait();

 private:
  const int count_, spins_;
  alignas(64) std::atomic<int> waiting_;
  alignas(64) std::atomic<uint32_t> phase_;
};

class Team {
 public:
  // A task is called once on each thread, with the thread's index.
  using Task = void (*)(void* context, int index);

  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  // Whether this is the process that made the team: after a fork the child has none of its threads.
  bool here() const;
  // Runs the task on all threads, the caller being thread 0; returns when all are done. One caller at a time.
  void run(Task task, void* context);
  // To be called by every thread within a task.
  void barrier() {
    if (size_ > 1) barrier_.wait();
  }

 private:
  void loop(int index);
  void dismiss();

  const int size_;
  const int64_t process_;
  Barrier barrier_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> stop_{0};
  std::vector<std::thread> threads_;
};

}  // namespace tenfold
