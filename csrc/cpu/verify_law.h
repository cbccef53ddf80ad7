// The distribution at one node: a row of logits under a temperature, read block by block.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/verify.h"

namespace specdec {
namespace verification {

// Rows of logits of one batch row; node i's starts at data + i * node_stride.
struct Logits {
  const char* data = nullptr;  // null: there are none
  int64_t node_stride = 0;     // bytes
  int64_t element_bytes = 0;
  int64_t size = 0;  // ids
  const RowKernel* kernel = nullptr;
};

// Shares out blocks 0 ... num_blocks - 1: call(body, begin, end) on several threads. Null: this thread does all.
using Threads = void (*)(int64_t num_blocks, const void* body,
                         void (*call)(const void* body, int64_t begin, int64_t end));

template <class Body>
void for_blocks(int64_t num_blocks, Threads threads, const Body& body) {
  if (threads) {
    threads(num_blocks, &body,
            [](const void* body, int64_t begin, int64_t end) { (*static_cast<const Body*>(body))(begin, end); });
  } else {
    body(0, num_blocks);
  }
}

// How a row is read.
enum class Reading : uint8_t {
  kLargest,  // its largest logit
  kRough,    // and the sum of its weights, to kRough of itself
  kExact,
  kEntropy,  // and what the entropy takes
};

// A softmax. Reading it touches each logit once; the rest reads single logits or blocks of it again.
class Law {
 public:
  // What is to be read, and how.
  void start(const Logits& logits, int64_t node, double temperature, Reading reading) {
    kernel_ = logits.kernel;
    row_ = logits.data + node * logits.node_stride;
    element_bytes_ = logits.element_bytes;
    size_ = logits.size;
    temperature_ = temperature;
    scale_ = 1.0 / kLn2 / temperature;
    // In fp32 the scale must be a normal number.
    reading_ = reading == Reading::kRough && scale_ < 0x1p-100 ? Reading::kExact : reading;
    const int64_t count = (size_ + kBlock - 1) / kBlock;
    largest_of_.resize(count);
    blocks_.assign(count, 0.0);
    logs_.assign(count, 0.0);
  }

  // Reads it. False if it cannot be judged: a NaN, +inf, or nothing but -inf.
  bool load(Threads threads) {
    for_blocks(num_blocks(), threads, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) read(b);
    });
    return finish();
  }

  // Two rows side by side.
  static bool load_both(Law* first, Law* second, Threads threads) {
    const int64_t borders = first->num_blocks();
    for_blocks(borders + second->num_blocks(), threads, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) b < borders ? first->read(b) : second->read(b - borders);
    });
    return first->finish() && second->finish();
  }

  // Sums a row that was read roughly again.
  void refine(Threads threads) {
    if (reading_ != Reading::kRough) return;
    reading_ = Reading::kExact;
    for_blocks(num_blocks(), threads, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) sum_exactly(b);
    });
    add_blocks();
  }

  // The first id of the largest logit of a row, or -1 if the row cannot be judged.
  int64_t load_argmax(const Logits& logits, int64_t node, Threads threads) {
    start(logits, node, 1.0, Reading::kLargest);
    if (!load(threads)) return -1;
    const int64_t b = std::find(largest_of_.begin(), largest_of_.end(), largest_) - largest_of_.begin();
    return b * kBlock + kernel_->find(at(b * kBlock), block_size(b), largest_);
  }

  bool is_rough() const { return reading_ == Reading::kRough; }
  int64_t size() const { return size_; }
  int64_t num_blocks() const { return static_cast<int64_t>(largest_of_.size()); }
  int64_t block_size(int64_t b) const { return std::min(kBlock, size_ - b * kBlock); }
  double total() const { return total_; }
  // Sums of the weights of each block.
  const std::vector<double>& blocks() const { return blocks_; }
  double weight(int64_t id) const {
    double w;
    weights(id, 1, &w);
    return w;
  }
  void weights(int64_t first, int64_t count, double* out) const {
    kernel_->weights(at(first), count, largest_, scale_, out);
  }
  const RowKernel& kernel() const { return *kernel_; }
  // In nats.
  double entropy() const { return kLn2 * (std::log2(total_) - weight_log2_ / total_); }

 private:
  static constexpr double kInf = std::numeric_limits<double>::infinity();

  const char* at(int64_t id) const { return row_ + id * element_bytes_; }

  void read(int64_t b) {
    const char* const from = at(b * kBlock);
    const int64_t count = block_size(b);
    if (reading_ == Reading::kRough) {
      const RoughSum sum = kernel_->rough_sum(from, count, scale_, size_ - b * kBlock - count);
      largest_of_[b] = sum.largest;
      blocks_[b] = sum.weight;
      return;
    }
    largest_of_[b] = kernel_->largest(from, count);
    if (reading_ != Reading::kLargest) sum_exactly(b);
  }

  bool finish() {
    largest_ = -kInf;
    for (const double x : largest_of_) {
      if (std::isnan(x)) return false;
      largest_ = std::max(largest_, x);
    }
    if (!std::isfinite(largest_ / temperature_)) return false;
    add_blocks();
    return std::isfinite(total_);
  }

  // Relative to the largest weight of the block.
  void sum_exactly(int64_t b) {
    if (!std::isfinite(largest_of_[b])) return;
    const auto sum = reading_ == Reading::kEntropy ? kernel_->entropy_sums : kernel_->sums;
    const Sums sums = sum(at(b * kBlock), block_size(b), largest_of_[b], scale_);
    blocks_[b] = sums.weight;
    logs_[b] = sums.weight_log2;
  }

  // Makes the sums of the blocks relative to the largest weight of all, and adds them.
  void add_blocks() {
    total_ = weight_log2_ = 0;
    for (size_t b = 0; b < blocks_.size(); ++b) {
      if (largest_of_[b] == -kInf) continue;
      const double shift = (largest_of_[b] - largest_) * scale_, factor = std::exp2(shift);
      if (factor > 0) weight_log2_ += factor * (logs_[b] + shift * blocks_[b]);
      blocks_[b] *= factor;
      total_ += blocks_[b];
    }
  }

  const RowKernel* kernel_ = nullptr;
  const char* row_ = nullptr;
  int64_t element_bytes_ = 0;
  int64_t size_ = 0;
  Reading reading_ = Reading::kExact;
  double temperature_ = 0;
  double scale_ = 0;
  double largest_ = 0;
  double total_ = 0;
  double weight_log2_ = 0;
  std::vector<double> largest_of_, blocks_, logs_;
};

// Where draft ids are other than the target's: column j of the draft logits is the target's id j + offsets[j].
class DraftVocab {
 public:
  struct Entry {
    int64_t id;
    int64_t column;
  };

  DraftVocab(const int64_t* offsets, int64_t stride, int64_t num_columns, int64_t vocab) {
    entries_.reserve(num_columns);
    for (int64_t j = 0; j < num_columns; ++j) {
      const int64_t offset = offsets[j * stride];
      if (offset >= -j && offset < vocab - j) {
        entries_.push_back({j + offset, j});
      } else {
        dropped_.push_back(j);
      }
    }
    const auto before = [](const Entry& a, const Entry& b) { return a.id < b.id; };
    if (!std::is_sorted(entries_.begin(), entries_.end(), before)) {
      std::stable_sort(entries_.begin(), entries_.end(), before);
    }
  }

  const std::vector<int64_t>& dropped() const { return dropped_; }

  // Weights of the target's ids first ... first + count - 1.
  void weights(const Law& law, int64_t first, int64_t count, double* out) const {
    std::fill_n(out, count, 0.0);
    const auto before = [](const Entry& e, int64_t id) { return e.id < id; };
    size_t i = std::lower_bound(entries_.begin(), entries_.end(), first, before) - entries_.begin();
    double some[kRun];
    while (i < entries_.size() && entries_[i].id < first + count) {
      // Columns side by side are read together.
      size_t end = i + 1;
      while (end < entries_.size() && end - i < kRun && entries_[end].id < first + count &&
             entries_[end].column == entries_[end - 1].column + 1) {
        ++end;
      }
      law.weights(entries_[i].column, static_cast<int64_t>(end - i), some);
      for (size_t k = i; k < end; ++k) out[entries_[k].id - first] += some[k - i];
      i = end;
    }
  }

 private:
  static constexpr size_t kRun = 64;
  std::vector<Entry> entries_;
  std::vector<int64_t> dropped_;
};

}  // namespace verification
}  // namespace specdec
