// The rules, one batch row at a time. docs/verification.md has the mathematics, reference/verify.py the same in torch.
// No index read from a tensor is used before it has been compared with the bounds.
#pragma once

#include "cpu/verify_residual.h"

namespace specdec {
namespace verification {

constexpr float kGreedyBelow = 1e-5f;

// Strides in elements, those of logits in bytes.
struct Problem {
  int64_t batch;
  int64_t num_nodes;
  int64_t vocab;
  const int64_t* ids;  // of node 0 in a tree, of node 1 in a chain
  int64_t ids_strides[2];
  int64_t first_id_node;   // 0 in a tree, 1 in a chain
  const int32_t* parents;  // null: a chain
  int64_t parents_strides[2];
  const int32_t* lengths;  // null: all nodes are in use
  int64_t lengths_stride;
  int64_t length_offset;  // nodes in use = length + this
  Logits target;
  int64_t target_batch_stride;
  Logits draft;
  int64_t draft_batch_stride;
  const DraftVocab* draft_vocab;
  bool with_replacement;
  const float* temperature;  // null: every row is greedy
  int64_t temperature_stride;
  const float* uniforms;  // one of the two, or none where all rows are greedy
  const double* uniforms64;
  int64_t uniforms_strides[2];
  double epsilon;
  double delta;
  int64_t* output_ids;
  int32_t* num_accepted;
  int32_t* accepted;
};

class Walk {
 public:
  Walk(const Problem& problem, Threads threads) : p_(problem), threads_(threads) {
    q_.start(p_.draft_vocab, p_.with_replacement);
  }

  void tree(int64_t row) { finish(row, start(row) ? greedy_tree() : sampled_tree()); }
  void block(int64_t row) { finish(row, start(row) ? greedy_block() : sampled_block()); }
  void typical(int64_t row) {
    start(row);
    finish(row, typical_path());
  }

 private:
  // Returns whether the row is greedy.
  bool start(int64_t row) {
    row_ = row;
    path_.clear();
    final_ = 0;
    target_ = p_.target;
    target_.data += row * p_.target_batch_stride;
    draft_ = p_.draft;
    if (draft_.data) draft_.data += row * p_.draft_batch_stride;
    temperature_ = p_.temperature ? p_.temperature[row * p_.temperature_stride] : 0;
    is_greedy_ = temperature_ < kGreedyBelow;
    in_use_ = p_.num_nodes;
    if (p_.lengths) {
      in_use_ = std::min<int64_t>(in_use_, p_.lengths[row * p_.lengths_stride] + p_.length_offset);
    }
    return is_greedy_;
  }

  int64_t id(int64_t node) const {
    return p_.ids[row_ * p_.ids_strides[0] + (node - p_.first_id_node) * p_.ids_strides[1]];
  }
  int64_t parent(int64_t node) const {
    return p_.parents ? p_.parents[row_ * p_.parents_strides[0] + node * p_.parents_strides[1]] : node - 1;
  }
  double uniform(int64_t node) const {
    const int64_t at = row_ * p_.uniforms_strides[0] + node * p_.uniforms_strides[1];
    return p_.uniforms64 ? p_.uniforms64[at] : static_cast<double>(p_.uniforms[at]);
  }
  // A node that exists; the root is none of them.
  bool usable(int64_t node) const {
    if (node < 1 || node >= in_use_) return false;
    const int64_t x = id(node);
    return x >= 0 && x < p_.vocab;
  }
  // Reads the target's row of a node.
  bool load_target(int64_t node) {
    if (!residual_.start(target_, node, temperature_, threads_, Reading::kExact)->load(threads_)) return false;
    residual_.finish();
    return true;
  }
  // Reads what its children are judged by: the target's row, and the drafter's if there is one.
  bool load_both(int64_t node, Reading reading) {
    Law* const p = residual_.start(target_, node, temperature_, threads_, reading);
    if (!draft_.data) {
      if (!p->load(threads_)) return false;
    } else {
      Law* const q = q_.start(draft_, node, temperature_, p_.vocab, threads_, reading);
      if (!Law::load_both(p, q, threads_)) return false;
      q_.finish();
    }
    residual_.finish();
    return true;
  }
  void refine() {
    if (draft_.data) q_.refine();
    residual_.refine(q_);
  }
  double law_of(int64_t x) const { return draft_.data ? q_.prob(x) : 0; }

  bool greedy_tree() {
    int64_t current = 0;
    final_ = law_.load_argmax(target_, 0, threads_);
    for (int64_t node = 1; node < in_use_ && final_ >= 0; ++node) {
      if (parent(node) != current || !usable(node) || id(node) != final_) continue;
      accept(current = node);
      final_ = law_.load_argmax(target_, node, threads_);
    }
    return final_ >= 0;
  }

  bool sampled_tree() {
    int64_t current = 0;
    bool is_loaded = false;
    for (int64_t node = 1; node < in_use_; ++node) {
      if (parent(node) != current || !usable(node)) continue;
      if (!is_loaded && !load_both(current, Reading::kRough)) return false;
      is_loaded = true;
      if (passes(node)) {
        accept(current = node);
        is_loaded = false;
      } else {
        reject(id(node));
      }
    }
    if (!is_loaded && !load_target(current)) return false;
    final_ = residual_.draw(uniform(0), q_);
    return true;
  }

  // Whether u * q(x) < p(x). Where rough sums leave it open, exact ones are made.
  bool passes(int64_t node) {
    const int64_t x = id(node);
    const double u = uniform(node), law_x = law_of(x);
    const double left = u * (law_x == 0 ? 1 : law_x), right = residual_.prob(x, q_);
    const double doubt = (law_x == 0 ? 0 : left * q_.error()) + right * residual_.error();
    if (std::abs(left - right) >= doubt) return left < right;
    refine();
    return u * (law_x == 0 ? 1 : q_.prob(x)) < residual_.prob(x, q_);
  }

  void reject(int64_t x) {
    if (law_of(x) == 0) {
      residual_.take_chosen(x, q_);
    } else {
      refine();
      residual_.take_drawn(q_);
    }
    if (draft_.data) q_.remove(x);
  }

  // Nodes 1 ... this many are in use.
  int64_t chain_length() const {
    int64_t node = 1;
    while (node < p_.num_nodes && usable(node)) ++node;
    return node - 1;
  }

  // The tree's result, but every row in use must be readable.
  bool greedy_block() {
    const int64_t length = chain_length();
    bool is_right = true;
    for (int64_t node = 0; node <= length; ++node) {
      const int64_t best = law_.load_argmax(target_, node, threads_);
      if (best < 0) return false;
      if (!is_right) continue;
      final_ = best;
      is_right = node < length && id(node + 1) == best;
      if (is_right) accept(node + 1);
    }
    return true;
  }

  bool sampled_block() {
    const int64_t length = chain_length();
    int64_t kept = 0;
    double weight = 1, kept_weight = 1;
    for (int64_t node = 0; node < length; ++node) {
      const int64_t x = id(node + 1);
      if (!load_both(node, Reading::kExact)) return false;
      const double p_x = residual_.prob(x, q_), law_x = law_of(x);
      const double mass = leave(weight, x, p_x, law_x), all = mass + 1 - weight;
      const double share = all > 0 ? mass / all : 1;
      if (node > 0 && uniform(node) < share) {
        kept = node;
        kept_weight = weight;
      }
      weight = std::min(weight * p_x / (law_x == 0 ? 1 : law_x), 1.0);
    }
    if (!load_target(length)) return false;
    if (length > 0 && uniform(length) < weight) kept = length;
    for (int64_t node = 1; node <= kept; ++node) accept(node);
    if (kept < length) {
      const int64_t x = id(kept + 1);
      load_both(kept, Reading::kExact);
      leave(kept_weight, x, residual_.prob(x, q_), law_of(x));
    }
    final_ = residual_.draw(uniform(0), q_);
    return true;
  }

  // Takes the law of x from weight * p and returns what remains; where nothing does, p stays.
  double leave(double weight, int64_t x, double p_x, double law_x) {
    if (weight <= 0) return 0;
    if (law_x > 0) return residual_.take_drawn(q_, weight) ? residual_.mass() : 0;
    if (!(p_x > 0)) return weight;
    const double mass = residual_.mass();
    return residual_.take_chosen(x, q_) ? weight * (residual_.mass() / mass) : 0;
  }

  bool typical_path() {
    depth_.assign(p_.num_nodes, -1);
    depth_[0] = 0;
    for (int64_t node = 0; node < p_.num_nodes - 1; ++node) {
      if (depth_[node] >= 0 && !typical_children(node)) return false;
    }
    const int64_t last = std::max_element(depth_.begin(), depth_.end()) - depth_.begin();
    for (int64_t node = last; node > 0; node = parent(node)) accept(node);
    std::reverse(path_.begin(), path_.end());
    if (is_greedy_) {
      final_ = law_.load_argmax(target_, last, threads_);
      return final_ >= 0;
    }
    if (!load_target(last)) return false;
    final_ = residual_.draw(uniform(0), q_);
    return true;
  }

  bool typical_children(int64_t node) {
    bool is_loaded = false;
    int64_t best = 0;
    double threshold = 0;
    for (int64_t child = node + 1; child < in_use_; ++child) {
      if (parent(child) != node || !usable(child)) continue;
      if (!is_loaded) {
        best = is_greedy_ ? law_.load_argmax(target_, node, threads_) : -1;
        if (is_greedy_ ? best < 0 : !load_entropy(node)) return false;
        threshold = std::min(is_greedy_ ? p_.delta : p_.delta * std::exp(-law_.entropy()), p_.epsilon);
        is_loaded = true;
      }
      const double prob = is_greedy_ ? id(child) == best : law_.weight(id(child)) / law_.total();
      if (prob > threshold) depth_[child] = depth_[node] + 1;
    }
    return true;
  }

  bool load_entropy(int64_t node) {
    law_.start(target_, node, temperature_, Reading::kEntropy);
    return law_.load(threads_);
  }

  void accept(int64_t node) { path_.push_back(static_cast<int32_t>(node)); }

  void finish(int64_t row, bool readable) {
    if (!readable) path_.clear();
    const int64_t count = static_cast<int64_t>(path_.size());
    int64_t* const output = p_.output_ids + row * p_.num_nodes;
    int32_t* const accepted = p_.accepted + row * (p_.num_nodes - 1);
    std::fill_n(output, p_.num_nodes, -1);
    std::fill_n(accepted, p_.num_nodes - 1, -1);
    for (int64_t i = 0; i < count; ++i) {
      output[i] = id(path_[i]);
      accepted[i] = path_[i];
    }
    if (readable) output[count] = final_;
    p_.num_accepted[row] = static_cast<int32_t>(count);
  }

  const Problem& p_;
  const Threads threads_;
  int64_t row_ = 0;
  Logits target_, draft_;
  float temperature_ = 0;
  bool is_greedy_ = false;
  int64_t in_use_ = 0;
  int64_t final_ = 0;
  std::vector<int32_t> path_;
  std::vector<int32_t> depth_;
  Law law_;
  Residual residual_;
  Draft q_;
};

}  // namespace verification
}  // namespace specdec
