// Linear layers on the CPU, torch-free: rows times the transpose of weight matrices that are read as they lie.
//
// Threads take tasks, some rows of one matrix each, in order; no result depends on who takes which, nor on how many
// rows there are: a product is summed in one order (medusa_project_tile.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/medusa_project_call.h"

namespace specdec {
namespace linear {

using medusa::Bytes;
using medusa::Machine;

struct Matrix {
  const char* data;
  int64_t stride;    // bytes
  int64_t count;     // rows
  const char* bias;  // or null
};

struct Call {
  Element element;
  std::vector<const char*> rows;
  std::vector<const char*> residual;  // rows to be added, or none
  int64_t width;
  std::vector<Matrix> matrices;
  bool is_gated;  // two matrices, of which the first goes through the activation and is multiplied with the second
  char* out;
  int64_t out_stride;  // bytes

  int64_t num_rows() const { return static_cast<int64_t>(rows.size()); }
};

// Weight rows of a task: few enough that threads finish together, also where a matrix is small.
constexpr int64_t kTaskRows = 48;
// Up to these rows, memory is what takes the time: then a thread reads one stretch of every matrix.
constexpr int64_t kFewRows = 32;
// Rows whose products are kept at a time: they, their operands and a task's weights share the second-level cache.
constexpr int64_t kBlockRows = 128;
static_assert(kTaskRows <= medusa::kChunk && kBlockRows % 4 == 0);

// Rows that are packed at a time where they are few: whole panels of the kernels.
constexpr int64_t kPackRows = 8;

class Run {
 public:
  // `operands` has room for the packed rows. The data of the matrices and the rows may change between stages.
  Run(const medusa::Kernel& kernel, const Call& call, char* operands)
      : kernel_(kernel), call_(call), operands_(operands), item_(bytes_of(call.element)) {
    int64_t column = 0;
    for (size_t i = 0; i < (call.is_gated ? 1 : call.matrices.size()); ++i) {
      const int64_t count = call.matrices[i].count;
      for (int64_t first = 0; first < count; first += kTaskRows) {
        tasks_.push_back({i, first, std::min(kTaskRows, count - first), column + first});
      }
      column += count;
    }
  }

  // Of memory that a thread needs for its products.
  int64_t product_bytes() const {
    const int64_t block = std::min(kBlockRows, call_.num_rows()) * medusa::kChunk;
    return block * medusa::product_bytes(call_.element) * (call_.is_gated ? 2 : 1);
  }

  void run(const Machine& machine) {
    pack_all(machine);
    const int64_t bytes = call_.width * item_;
    int64_t all = 0;
    for (const Matrix& matrix : call_.matrices) all += matrix.count * bytes;
    constexpr int64_t kBytesPerThread = 128 << 10;  // of weights; below, waking a thread costs more than it saves
    const int64_t useful = std::max(all / kBytesPerThread, call_.num_rows() * all / (kBytesPerThread << 5));
    const int64_t workers = std::max<int64_t>(1, std::min({machine.num_threads, num_tasks(), useful}));
    std::atomic<int64_t> next{0};
    machine.run(workers, [&](int64_t worker) {
      const Bytes products(product_bytes());
      if (call_.num_rows() <= kFewRows) {
        const int64_t n = num_tasks();
        for (int64_t i = worker * n / workers; i < (worker + 1) * n / workers; ++i) work(i, products.data());
        return;
      }
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks();) work(i, products.data());
    });
  }

  // The stages of a run, for who has threads of his own: rows are packed, all of them, then tasks are done.
  int64_t num_packs() const { return (call_.num_rows() + rows_per_pack() - 1) / rows_per_pack(); }
  int64_t rows_per_pack() const { return call_.num_rows() <= 64 ? kPackRows : 64; }
  void pack(int64_t part) const {
    const int64_t first = part * rows_per_pack();
    kernel_.pack(call_.rows.data() + first, std::min(rows_per_pack(), call_.num_rows() - first), call_.width,
                 operands_of(first));
  }
  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }
  void work(int64_t i, char* products) const {
    const Task& task = tasks_[i];
    const int64_t stride = medusa::kChunk * medusa::product_bytes(call_.element);
    for (int64_t first = 0; first < call_.num_rows(); first += kBlockRows) {
      const int64_t count = std::min(kBlockRows, call_.num_rows() - first);
      char* const others = products + count * stride;
      multiply(call_.matrices[task.matrix], task, first, count, products);
      if (call_.is_gated) multiply(call_.matrices[1], task, first, count, others);
      for (int64_t row = 0; row < count; ++row)
        finish(task, first + row, products + row * stride, others + row * stride);
    }
  }

 private:
  struct Task {
    size_t matrix;
    int64_t first;
    int64_t count;
    int64_t column;  // of the output
  };

  void pack_all(const Machine& machine) const {
    const int64_t parts = num_packs(), workers = call_.num_rows() <= 64 ? 1 : std::min(machine.num_threads, parts);
    const auto pack_some = [&](int64_t worker) {
      for (int64_t part = worker; part < parts; part += workers) pack(part);
    };
    if (workers == 1) return pack_some(0);
    machine.run(workers, pack_some);
  }

  char* operands_of(int64_t row) const { return operands_ + kernel_.operand_bytes(row, call_.width); }

  // Products of a block of rows with the weights of a task, or with those at the same place in another matrix.
  void multiply(const Matrix& matrix, const Task& task, int64_t row, int64_t count, char* products) const {
    const medusa::Weights weights{matrix.data + task.first * matrix.stride, matrix.stride, task.count,
                                  matrix.count - task.first, call_.width};
    kernel_.multiply(weights, operands_of(row), count, products);
  }

  void finish(const Task& task, int64_t row, const char* products, const char* others) const {
    char* const out = call_.out + row * call_.out_stride + task.column * item_;
    const auto bias_of = [&](size_t i) {
      const char* const bias = call_.matrices[i].bias;
      return bias ? bias + task.first * item_ : nullptr;
    };
    if (call_.is_gated) {
      kernel_.finish_gated(products, bias_of(0), others, bias_of(1), task.count, out);
    } else {
      const char* const residual = call_.residual.empty() ? nullptr : call_.residual[row] + task.column * item_;
      kernel_.finish_linear(products, bias_of(task.matrix), residual, task.count, out);
    }
  }

  const medusa::Kernel& kernel_;
  const Call& call_;
  char* const operands_;
  const int64_t item_;
  std::vector<Task> tasks_;
};

}  // namespace linear
}  // namespace specdec
