// Threads that go through the same stages, each a number of tasks, without being woken for each of them.
//
// A stage is over when all its tasks are done, whoever did them: a thread that comes late finds nothing left and goes
// on, and one that never comes is not missed. So nothing depends on how many threads there really are.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace specdec {

class Stages {
 public:
  Stages(int64_t count, int64_t num_workers)
      : num_workers_(num_workers), counters_(new Counter[count * (num_workers + 1)]) {}

  // A thread's way through the stages. Every thread makes the same calls of `run`.
  class Member {
   public:
    Member(const Stages& stages, int64_t worker) : stages_(stages), worker_(worker) {}

    // Calls do_task(i) for tasks 0 ... count - 1, this thread's stretch first, then what the others have not begun.
    // What was written before this stage may be read in it. Calls before_waiting() when nothing is left to begin.
    template <class F, class G>
    void run(int64_t count, const F& do_task, const G& before_waiting) {
      const int64_t workers = stages_.num_workers_;
      Counter* const next = stages_.counters_.get() + stage_++ * (workers + 1);
      std::atomic<int64_t>& done = next[workers].value;
      int64_t finished = 0;
      for (int64_t k = 0; k < workers; ++k) {
        const int64_t owner = (worker_ + k) % workers;
        const int64_t begin = owner * count / workers, size = (owner + 1) * count / workers - begin;
        for (int64_t i; (i = next[owner].value.fetch_add(1, std::memory_order_relaxed)) < size; ++finished) {
          do_task(begin + i);
        }
      }
      if (finished > 0) done.fetch_add(finished, std::memory_order_release);
      before_waiting();
      for (int spins = 0; done.load(std::memory_order_acquire) < count; ++spins) {
        if (spins < kSpins) {
          pause();
        } else {
          std::this_thread::yield();
        }
      }
    }

    template <class F>
    void run(int64_t count, const F& do_task) {
      run(count, do_task, [] {});
    }

   private:
    // Tens of microseconds: stages are shorter unless a thread was put to sleep.
    static constexpr int kSpins = 1 << 10;

    static void pause() {
#if defined(__x86_64__)
      _mm_pause();
#endif
    }

    const Stages& stages_;
    int64_t worker_;
    int64_t stage_ = 0;
  };

 private:
  // Of a stage: the next task of each thread's stretch, then the tasks that are done. Lines of their own.
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  int64_t num_workers_;
  std::unique_ptr<Counter[]> counters_;
};

}  // namespace specdec
