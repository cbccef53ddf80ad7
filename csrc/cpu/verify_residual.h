// What the target still wants at a node while its children are judged, and what they are drawn from.
#pragma once

#include <numeric>

#include "cpu/verify_law.h"

namespace specdec {
namespace verification {

// Less than this share of a sum is not found by subtracting from it but by summing again.
constexpr double kCancels = 1e-3;

// q over the target's ids, without those that were rejected.
class Draft {
 public:
  void start(const DraftVocab* vocab, bool with_replacement) {
    vocab_ = vocab;
    with_replacement_ = with_replacement;
  }

  // Before its law is read, and after.
  Law* start(const Logits& logits, int64_t node, double temperature, int64_t num_ids, Threads threads,
             Reading reading) {
    num_ids_ = num_ids;
    threads_ = threads;
    removed_.clear();
    law_.start(logits, node, temperature, reading);
    return &law_;
  }
  void finish() {
    norm_ = rest_ = fresh_ = law_.total();
    if (!vocab_ || law_.is_rough()) return;
    for (const int64_t column : vocab_->dropped()) rest_ -= law_.weight(column);
    if (rest_ < kCancels * fresh_) sum_again();
  }

  // Makes norm() exact; before, its relative error is within error().
  void refine() {
    if (!law_.is_rough()) return;
    law_.refine(threads_);
    finish();
  }
  double error() const { return law_.is_rough() ? kRough : 0; }
  double norm() const { return norm_; }
  size_t num_removed() const { return removed_.size(); }
  const std::vector<int64_t>& removed() const { return removed_; }

  double prob(int64_t id) const {
    if (norm_ <= 0 || std::find(removed_.begin(), removed_.end(), id) != removed_.end()) return 0;
    return raw(id) / norm_;
  }

  // Weights with nothing removed.
  void weights(int64_t first, int64_t count, double* out) const {
    if (vocab_) {
      vocab_->weights(law_, first, count, out);
    } else {
      law_.weights(first, count, out);
    }
  }

  void remove(int64_t id) {
    if (with_replacement_ || norm_ <= 0) return;
    refine();
    if (std::find(removed_.begin(), removed_.end(), id) == removed_.end()) {
      rest_ -= raw(id);
      removed_.push_back(id);
      if (rest_ < kCancels * fresh_) sum_again();
    }
    norm_ = rest_;
  }

 private:
  double raw(int64_t id) const {
    double w;
    weights(id, 1, &w);
    return w;
  }

  // The weights that are left, one by one.
  void sum_again() {
    std::vector<double> sums((num_ids_ + kBlock - 1) / kBlock);
    for_blocks(static_cast<int64_t>(sums.size()), threads_, [&](int64_t begin, int64_t end) {
      double w[kBlock];
      for (int64_t b = begin; b < end; ++b) {
        const int64_t first = b * kBlock, count = std::min(kBlock, num_ids_ - first);
        weights(first, count, w);
        for (const int64_t id : removed_) {
          if (id >= first && id < first + count) w[id - first] = 0;
        }
        sums[b] = law_.kernel().sum(w, count);
      }
    });
    rest_ = fresh_ = std::accumulate(sums.begin(), sums.end(), 0.0);
  }

  const DraftVocab* vocab_ = nullptr;
  bool with_replacement_ = false;
  Threads threads_ = nullptr;
  Law law_;
  int64_t num_ids_ = 0;
  double norm_ = 0;   // what the weights are divided by: the sum of those in the law that the next child came from
  double rest_ = 0;   // the sum of those on the target's ids that are not removed
  double fresh_ = 0;  // what it was when it was last summed
  std::vector<int64_t> removed_;
};

// p, from which laws of rejected drafts have been taken. Kept as the steps that lead to it: a weight is computed when
// it is asked for.
class Residual {
 public:
  // Before its law is read, and after.
  Law* start(const Logits& logits, int64_t node, double temperature, Threads threads, Reading reading) {
    threads_ = threads;
    steps_.clear();
    law_.start(logits, node, temperature, reading);
    return &law_;
  }
  void finish() {
    mass_ = fresh_ = law_.total();
    is_rough_ = law_.is_rough();
    blocks_ = law_.blocks();
  }

  // Makes mass() exact; before, its relative error is within error().
  void refine(const Draft& draft) {
    if (is_rough_) sum_again(draft);
  }
  double error() const { return is_rough_ ? kRough * fresh_ / mass_ : 0; }

  double mass() const { return mass_; }

  double prob(int64_t id, const Draft& draft) const {
    double w;
    weights(id, 1, draft, &w);
    return w / mass_;
  }

  // p becomes max(p - one-hot(id), 0). Where nothing remains, p stays, and the answer is false.
  bool take_chosen(int64_t id, const Draft& draft) {
    double w;
    weights(id, 1, draft, &w);
    if (!(w > 0)) return true;
    if (mass_ - w < kCancels * fresh_) return take({id, 0, 0, 0}, draft);
    steps_.push_back({id, 0, 0, 0});
    mass_ -= w;
    double& block = blocks_[id / kBlock];
    block = std::max(block - w, 0.0);
    return true;
  }

  // p becomes max(share * p - q, 0), in the same way. Both sums must be exact.
  bool take_drawn(const Draft& draft, double share = 1) {
    return take({-1, share / mass_, 1 / draft.norm(), draft.num_removed()}, draft);
  }

  // The first id whose cumulative weight exceeds u of the sum; never one of weight 0.
  int64_t draw(double u, const Draft& draft) {
    refine(draft);
    double total = 0;
    for (const double x : blocks_) total += x;
    const double level = std::min(u * total, std::nextafter(total, 0.0));
    double before = 0;
    std::vector<double> w(std::min(kBlock, law_.size()));
    int64_t b = 0;
    for (; b < law_.num_blocks(); before += blocks_[b++]) {
      if (before + blocks_[b] <= level) continue;
      weights(b * kBlock, law_.block_size(b), draft, w.data());
      double cumulative = before;
      for (int64_t i = 0; i < law_.block_size(b); ++i) {
        cumulative += w[i];
        if (w[i] > 0 && cumulative > level) return b * kBlock + i;
      }
    }
    // Rounding put the level behind all ids: a sum from which weights were subtracted is not that of the others.
    while (b-- > 0) {
      weights(b * kBlock, law_.block_size(b), draft, w.data());
      for (int64_t i = law_.block_size(b); i-- > 0;) {
        if (w[i] > 0) return b * kBlock + i;
      }
    }
    return 0;
  }

 private:
  struct Step {
    int64_t chosen;  // an id, or -1 for a law
    double scale;    // of the weights of p
    double q_scale;  // of those of q
    size_t removed;  // ids that q has lost by then
  };

  void weights(int64_t first, int64_t count, const Draft& draft, double* out) const {
    law_.weights(first, count, out);
    double q[kBlock];
    bool has_q = false;
    size_t removed = 0;
    for (const Step& step : steps_) {
      if (step.chosen >= 0) {
        if (step.chosen >= first && step.chosen < first + count) out[step.chosen - first] = 0;
        continue;
      }
      if (!has_q) draft.weights(first, count, q);
      has_q = true;
      for (; removed < step.removed; ++removed) {
        const int64_t id = draft.removed()[removed];
        if (id >= first && id < first + count) q[id - first] = 0;
      }
      law_.kernel().subtract(out, q, count, step.scale, step.q_scale);
    }
  }

  bool take(const Step& step, const Draft& draft) {
    steps_.push_back(step);
    if (sum_again(draft)) return true;
    steps_.pop_back();
    return false;
  }

  // Returns false and changes nothing if nothing remains.
  bool sum_again(const Draft& draft) {
    std::vector<double> sums(blocks_.size());
    for_blocks(law_.num_blocks(), threads_, [&](int64_t begin, int64_t end) {
      double w[kBlock];
      for (int64_t b = begin; b < end; ++b) {
        const int64_t count = law_.block_size(b);
        weights(b * kBlock, count, draft, w);
        sums[b] = law_.kernel().sum(w, count);
      }
    });
    const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
    if (!(total > 0)) return false;
    mass_ = fresh_ = total;
    is_rough_ = false;
    blocks_.swap(sums);
    return true;
  }

  Threads threads_ = nullptr;
  Law law_;
  std::vector<Step> steps_;
  double mass_ = 0;
  double fresh_ = 0;  // what it was when it was last summed
  bool is_rough_ = false;
  std::vector<double> blocks_;
};

}  // namespace verification
}  // namespace specdec
