// Linear layers on the kernels of the Medusa heads, which take long to compile: part of their driver. Results against
// sums in double; a row alone, and on several threads, has the same bits.
#pragma once

#include <cmath>
#include <cstring>
#include <thread>

#include "cpu/linear.h"
#include "numbers.h"

inline specdec::medusa::Machine machine_of(const specdec::medusa::Kernel* kernel, int64_t num_threads) {
  return {kernel, num_threads, [](int64_t workers, const std::function<void(int64_t)>& body) {
            std::vector<std::thread> threads;
            for (int64_t i = 0; i < workers; ++i) threads.emplace_back(body, i);
            for (std::thread& thread : threads) thread.join();
          }};
}

class LinearTrial {
 public:
  LinearTrial(specdec::Element element, int64_t rows, int64_t width, const std::vector<int64_t>& counts, bool gated)
      : element_(element), x_(element, rows * width) {
    const int64_t item = specdec::bytes_of(element);
    const bool has_bias = below(2);
    call_.element = element, call_.width = width, call_.is_gated = gated;
    for (int64_t row = 0; row < rows; ++row) call_.rows.push_back(x_.data(row * width));
    for (const int64_t count : counts) {
      weights_.push_back(std::make_unique<Numbers>(element, count * width));
      biases_.push_back(std::make_unique<Numbers>(element, count));
      call_.matrices.push_back(
          {weights_.back()->data(), width * item, count, has_bias ? biases_.back()->data() : nullptr});
      if (!gated || columns_ == 0) columns_ += count;
    }
    residual_ = std::make_unique<Numbers>(element, rows * columns_);
    call_.out_stride = columns_ * item;
    if (gated || below(2)) return;
    for (int64_t row = 0; row < rows; ++row) call_.residual.push_back(residual_->data(row * columns_));
  }

  void check(const specdec::medusa::Kernel* kernel, int64_t more_threads) {
    const int64_t rows = call_.num_rows(), row_bytes = call_.out_stride;
    const Numbers out(element_, rows * columns_), again(element_, rows * columns_), row(element_, columns_);
    run(kernel, 1, call_, out);
    run(kernel, more_threads, call_, again);
    require(std::memcmp(out.data(), again.data(), rows * row_bytes) == 0, "threads change a product");
    for (int64_t i = 0; i < rows * columns_; ++i) check(i / columns_, i % columns_, out.at(i));
    const int64_t one = below(rows);
    specdec::linear::Call alone = call_;
    alone.rows = {call_.rows[one]};
    if (!call_.residual.empty()) alone.residual = {call_.residual[one]};
    run(kernel, 1, alone, row);
    require(std::memcmp(row.data(), out.data(one * columns_), row_bytes) == 0, "other rows change a product");
  }

 private:
  struct Sum {
    double value;
    double magnitude;  // of what was summed
  };

  static void run(const specdec::medusa::Kernel* kernel, int64_t num_threads, specdec::linear::Call call,
                  const Numbers& out) {
    call.out = out.data();
    const specdec::medusa::Machine machine = machine_of(kernel, num_threads);
    const specdec::medusa::Bytes operands(kernel->operand_bytes(call.num_rows(), call.width));
    specdec::linear::Run(*kernel, call, operands.data()).run(machine);
  }

  Sum sum(int64_t row, size_t matrix, int64_t weight_row) const {
    const double bias = call_.matrices[matrix].bias ? biases_[matrix]->values[weight_row] : 0;
    Sum to{bias, std::abs(bias)};
    for (int64_t i = 0; i < call_.width; ++i) {
      const double term = x_.values[row * call_.width + i] * weights_[matrix]->values[weight_row * call_.width + i];
      to.value += term, to.magnitude += std::abs(term);
    }
    return to;
  }

  void check(int64_t row, int64_t column, double have) const {
    using specdec::Element;
    const bool is_half = element_ == Element::kHalf || element_ == Element::kBFloat16;
    const double tolerance = element_ == Element::kDouble ? 1e-12 : is_half ? 1e-2 : 1e-5;
    const double step = element_ == Element::kHalf ? 0x1p-24 : 0;  // between the smallest numbers
    double want, allowed;
    if (call_.is_gated) {
      const Sum gate = sum(row, 0, column), up = sum(row, 1, column);
      want = gate.value / (1 + std::exp(-gate.value)) * up.value;
      allowed = tolerance * (1.1 * gate.magnitude * (std::abs(up.value) + tolerance * up.magnitude) +
                             std::abs(gate.value) * up.magnitude);
    } else {
      size_t matrix = 0;
      int64_t weight_row = column;
      while (weight_row >= call_.matrices[matrix].count) weight_row -= call_.matrices[matrix++].count;
      const Sum product = sum(row, matrix, weight_row);
      const double added = call_.residual.empty() ? 0 : residual_->values[row * columns_ + column];
      want = product.value + added;
      allowed = tolerance * (product.magnitude + std::abs(added));
    }
    require(std::abs(have - want) <= allowed + step, "a product");
  }

  specdec::Element element_;
  Numbers x_;
  std::vector<std::unique_ptr<Numbers>> weights_, biases_;
  std::unique_ptr<Numbers> residual_;
  specdec::linear::Call call_{};
  int64_t columns_ = 0;
};

// Borders of tasks, blocks and vectors, and enough weights for several threads.
inline void try_linear(specdec::Element element, const specdec::medusa::Kernel* kernel) {
  for (int i = 0; i < 12; ++i) {
    const int64_t rows = pick({1, 2, 5, 32, 33, 130}), width = pick({1, 3, 16, 31, 33, 64, 150});
    const int64_t count = pick({1, 6, 47, 48, 49, 100}), other = pick({1, 5, 48, 97});
    const bool gated = i % 2;
    std::vector<int64_t> counts = gated ? std::vector<int64_t>{count, count} : std::vector<int64_t>{count, other, 7};
    LinearTrial(element, rows, width, counts, gated).check(kernel, 3);
  }
  for (const int64_t rows : {3, 40}) LinearTrial(element, rows, 520, {500, 700}, false).check(kernel, 5);
}
