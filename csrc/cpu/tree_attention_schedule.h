// Cuts a call into tasks and runs them. Nothing here changes a bit of the result: see tree_attention.h, kChunk.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu/tree_attention_plan.h"

namespace specdec {
namespace attention {

// Memory that a thread keeps between calls: pages fresh from the system cost more than a small problem.
class Workspace {
 public:
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      data_.reset(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
      size_ = data_ ? bytes : 0;
      if (!data_) throw std::bad_alloc();
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
  size_t size_ = 0;
};

// How the rows of each (batch row, KV head) are cut.
struct Cut {
  int32_t rows = 1;    // of a block, at most
  int32_t groups = 0;  // of a split, 0: not split
};

class Schedule {
 public:
  Schedule(const Problem& problem, const Kernel& kernel, const std::vector<std::unique_ptr<Planner>>& plans,
           int64_t num_threads)
      : problem_(problem), kernel_(kernel), plans_(plans), num_heads_(problem.num_q_heads / problem.group_size) {
    const Cut cut = choose_cut(num_threads);
    workspace_bytes_ = kernel.workspace_bytes(problem, cut.rows);
    // Long rows first: the last tasks to end are short ones.
    for (int64_t b = static_cast<int64_t>(plans.size()) - 1; b >= 0; --b) {
      const int32_t rows = plan(b).num_nodes * problem.group_size;
      const int32_t blocks = (rows + cut.rows - 1) / cut.rows;
      for (int32_t block = blocks - 1; block >= 0; --block) {
        for (int32_t head = 0; head < num_heads_; ++head) {
          add_block({static_cast<int32_t>(b), head, cut_at(rows, blocks, block), cut_at(rows, blocks, block + 1), 0, 0,
                     nullptr},
                    cut.groups);
        }
      }
    }
  }

  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }

  // Called by each thread: takes tasks until none is left.
  void work(Workspace* workspace) {
    void* memory = workspace->reserve(workspace_bytes_);
    for (;;) {
      const int64_t i = next_task_.fetch_add(1, std::memory_order_relaxed);
      if (i >= num_tasks()) return;
      run_task(problem_, i, memory);
    }
  }

  size_t workspace_bytes() const { return workspace_bytes_; }

  // One task, of this problem or one that differs in its tensors only. When all were run, they may be run again.
  void run_task(const Problem& problem, int64_t i, void* memory) {
    const auto& [task, split] = tasks_[i];
    kernel_.attend(problem, plan(task.batch), task, memory);
    if (split == nullptr || split->left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    kernel_.merge(problem, plan(task.batch), split->whole, memory);
    split->left.store(split->count, std::memory_order_relaxed);
  }

 private:
  // Rows whose keys several tasks share; who ends last merges.
  struct Split {
    Task whole;
    std::unique_ptr<char[]> partials;
    int32_t count;
    std::atomic<int32_t> left;
  };

  static constexpr int32_t kMaxRows = 256, kMinRows = 24;
  static constexpr size_t kWorkspaceBytes = 768 << 10;  // should stay in the second-level cache
  static constexpr size_t kPartialBytes = 2 << 20;
  static constexpr double kPackCost = 8;  // packing a chunk costs as much as this many rows of it

  const Plan& plan(int64_t b) const { return plans_[b]->plan(); }

  static int32_t cut_at(int32_t rows, int32_t blocks, int32_t block) {
    return static_cast<int32_t>(int64_t{rows} * block / blocks);
  }

  int64_t first_group(const Plan& p, const Task& task) const {
    int64_t first = p.prefix + p.depths[task.row_begin / problem_.group_size];
    for (int32_t r = task.row_begin; r < task.row_end; r += 1) {
      first = std::min<int64_t>(first, p.prefix + p.depths[r / problem_.group_size]);
    }
    return problem_.window > 0 && problem_.window <= first ? (first + 1 - problem_.window) / kChunk / kChunksPerGroup
                                                           : 0;
  }

  int64_t end_group(const Plan& p, const Task& task) const {
    int64_t last = 0;
    for (int32_t r = task.row_begin; r < task.row_end; r += 1) {
      last = std::max<int64_t>(last, p.prefix + p.depths[r / problem_.group_size]);
    }
    return last / kChunk / kChunksPerGroup + 1;
  }

  // Weighs few large tasks, which pack the keys seldom, against an even load of the threads.
  Cut choose_cut(int64_t num_threads) const {
    int32_t most_rows = 1;
    int64_t longest = 0, jobs = 0;
    for (size_t b = 0; b < plans_.size(); ++b) {
      most_rows = std::max(most_rows, plan(b).num_nodes * problem_.group_size);
      longest = std::max(longest, plan(b).prefix + plan(b).num_nodes);
      jobs += num_heads_;
    }
    int32_t max_rows = kMaxRows;
    while (max_rows > kMinRows && kernel_.workspace_bytes(problem_, max_rows) > kWorkspaceBytes) max_rows /= 2;
    const auto rounds = [&](int64_t tasks) { return static_cast<double>((tasks + num_threads - 1) / num_threads); };
    const int32_t fewest = (most_rows + max_rows - 1) / max_rows;
    Cut best;
    double best_cost = 0;
    for (int32_t blocks = fewest; blocks <= fewest + 2 * num_threads; ++blocks) {
      const int32_t rows = (most_rows + blocks - 1) / blocks;
      const double cost = rounds(jobs * blocks) * (rows + kPackCost);
      if (blocks > fewest && (rows < kMinRows || cost > 0.95 * best_cost)) continue;
      best = {rows, 0};
      best_cost = cost;
    }
    const int64_t groups = longest / (kChunk * kChunksPerGroup) + 1;
    for (int64_t per_split = (groups + 1) / 2; per_split >= 1; per_split = per_split > 1 ? (per_split + 1) / 2 : 0) {
      const int64_t splits = (groups + per_split - 1) / per_split;
      const double cost = rounds(jobs * fewest * splits) * (most_rows / fewest + kPackCost) * per_split / groups;
      const size_t bytes = kernel_.partial_bytes(problem_, most_rows / fewest + 1) * fewest * jobs * groups;
      if (cost > 0.95 * best_cost || bytes > kPartialBytes) continue;
      best = {(most_rows + fewest - 1) / fewest, static_cast<int32_t>(per_split)};
      best_cost = cost;
    }
    return best;
  }

  void add_block(Task task, int32_t groups_per_split) {
    const Plan& p = plan(task.batch);
    const int32_t end = static_cast<int32_t>(end_group(p, task));
    task.group_begin = static_cast<int32_t>(first_group(p, task));
    task.group_end = end;
    if (groups_per_split == 0 || end - task.group_begin <= groups_per_split) {
      tasks_.push_back({task, nullptr});
      return;
    }
    splits_.push_back(std::make_unique<Split>());
    Split* split = splits_.back().get();
    split->partials.reset(new char[kernel_.partial_bytes(problem_, task.row_end - task.row_begin) * end + 64]);
    task.partials = split->partials.get();
    split->whole = task;
    int32_t count = 0;
    for (int32_t begin = task.group_begin; begin < end; begin += groups_per_split, ++count) {
      task.group_begin = begin;
      task.group_end = std::min(begin + groups_per_split, end);
      tasks_.push_back({task, split});
    }
    split->count = count;
    split->left = count;
  }

  const Problem& problem_;
  const Kernel& kernel_;
  const std::vector<std::unique_ptr<Planner>>& plans_;
  int32_t num_heads_;
  size_t workspace_bytes_;
  std::vector<std::unique_ptr<Split>> splits_;
  std::vector<std::pair<Task, Split*>> tasks_;
  std::atomic<int64_t> next_task_{0};
};

}  // namespace attention
}  // namespace specdec
