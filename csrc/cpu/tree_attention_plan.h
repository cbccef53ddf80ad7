// From ancestor masks to plans: which nodes share which keys.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/tree_attention.h"

namespace specdec {
namespace attention {

// (num_nodes, words) int64, bit j % 64 of word j / 64 of row i: node i sees node j. Strides in elements.
struct MaskView {
  const int64_t* data;
  int64_t row_stride;
  int64_t word_stride;
  int32_t num_nodes;
};

// Builds the plan of one batch row and owns its arrays. A row of the mask is taken as it is: the keys are its set bits,
// in the order of their numbers, and the depth is their number minus one. That the mask is a tree only makes it fast.
class Planner {
 public:
  Planner(const MaskView& mask, int64_t prefix) : words_((mask.num_nodes + 63) / 64) {
    read_sets(mask);
    order_nodes();
    plan_.prefix = prefix;
    plan_.num_nodes = static_cast<int32_t>(order_.size());
    plan_.nodes = order_.data();
    for (const int32_t node : order_) depths_.push_back(sizes_[node] - 1);
    plan_.depths = depths_.data();
    build_clusters(prefix);
  }
  Planner(const Planner&) = delete;
  Planner& operator=(const Planner&) = delete;

  const Plan& plan() const { return plan_; }

 private:
  const uint64_t* set(int32_t node) const { return sets_.data() + static_cast<size_t>(node) * words_; }

  void read_sets(const MaskView& mask) {
    const int32_t count = mask.num_nodes;
    sets_.resize(static_cast<size_t>(count) * words_);
    sizes_.resize(count);
    for (std::vector<int32_t>* list : {&order_, &depths_, &keys_}) list->reserve(count);
    clusters_.reserve(count);
    members_.reserve(kChunk);
    const uint64_t last = count % 64 ? (uint64_t{1} << count % 64) - 1 : ~uint64_t{0};
    for (int32_t i = 0; i < count; ++i) {
      for (int32_t w = 0; w < words_; ++w) {
        const uint64_t word = static_cast<uint64_t>(mask.data[i * mask.row_stride + w * mask.word_stride]) &
                              (w + 1 < words_ ? ~uint64_t{0} : last);
        sets_[static_cast<size_t>(i) * words_ + w] = word;
        sizes_[i] += __builtin_popcountll(word);
      }
    }
  }

  // The largest node below `node` in its set, -1 for a root.
  int32_t parent_of(int32_t node) const {
    for (int32_t w = node / 64; w >= 0; --w) {
      uint64_t word = set(node)[w];
      if (w == node / 64) word &= (uint64_t{1} << node % 64) - 1;
      if (word != 0) return w * 64 + 63 - __builtin_clzll(word);
    }
    return -1;
  }

  // Depth-first, children in the order of their numbers.
  void order_nodes() {
    const int32_t count = static_cast<int32_t>(sizes_.size());
    std::vector<int32_t> first_child(count + 1, -1), next_sibling(count, -1), stack;
    for (int32_t node = count - 1; node >= 0; --node) {
      if (sizes_[node] == 0) continue;
      const int32_t parent = parent_of(node);
      const int32_t slot = parent >= 0 && sizes_[parent] > 0 ? parent : count;
      next_sibling[node] = first_child[slot];
      first_child[slot] = node;
    }
    if (first_child[count] >= 0) stack.push_back(first_child[count]);
    while (!stack.empty()) {
      const int32_t node = stack.back();
      stack.pop_back();
      order_.push_back(node);
      if (next_sibling[node] >= 0) stack.push_back(next_sibling[node]);
      if (first_child[node] >= 0) stack.push_back(first_child[node]);
    }
  }

  // Whether a node sees what the other sees, then itself.
  bool continues(int32_t node, int32_t other) const {
    for (int32_t w = 0; w < words_; ++w) {
      uint64_t word = set(other)[w];
      if (w == node / 64) {
        if (word >> node % 64) return false;
        word |= uint64_t{1} << node % 64;
      } else if (w > node / 64 && word != 0) {
        return false;
      }
      if (word != set(node)[w]) return false;
    }
    return true;
  }

  // Members low ... high - 1 of the node's set.
  void list_members(int32_t node, int32_t low, int32_t high, std::vector<int32_t>* to) const {
    to->clear();
    int32_t rank = 0;
    for (int32_t w = 0; w < words_ && rank < high; ++w) {
      uint64_t word = set(node)[w];
      const int32_t count = __builtin_popcountll(word);
      if (rank + count <= low) {
        rank += count;
        continue;
      }
      for (; word != 0 && rank < high; word &= word - 1, ++rank) {
        if (rank >= low) to->push_back(w * 64 + __builtin_ctzll(word));
      }
    }
  }

  void build_clusters(int64_t prefix) {
    const int32_t count = plan_.num_nodes;
    std::vector<char> chained(count, 0);
    int32_t deepest = -1;
    for (int32_t i = 0; i < count; ++i) {
      chained[i] = i > 0 && continues(order_[i], order_[i - 1]);
      deepest = depths_[i] > deepest ? depths_[i] : deepest;
    }
    const int64_t first = prefix / kChunk;
    plan_.num_tail_chunks = deepest < 0 ? 0 : static_cast<int32_t>((prefix + deepest) / kChunk - first + 1);
    for (int32_t c = 0; c < plan_.num_tail_chunks; ++c) {
      first_cluster_.push_back(static_cast<int32_t>(clusters_.size()));
      const int64_t low = (first + c) * kChunk - prefix, high = low + kChunk;
      cluster_chunk(chained, static_cast<int32_t>(low > 0 ? low : 0), static_cast<int32_t>(high),
                    static_cast<int32_t>(low < 0 ? -low : 0));
    }
    first_cluster_.push_back(static_cast<int32_t>(clusters_.size()));
    plan_.first_cluster = first_cluster_.data();
    size_t at = 0;
    for (Cluster& cluster : clusters_) {
      cluster.nodes = keys_.data() + at;
      at += cluster.num_nodes;
    }
    plan_.clusters = clusters_.data();
  }

  // Clusters of the chunk that holds the path members low ... high - 1, behind `num_prefix` rows of the prefix.
  void cluster_chunk(const std::vector<char>& chained, int32_t low, int32_t high, int32_t num_prefix) {
    const size_t first = clusters_.size();
    bool open = false;
    int32_t seen_by_last = 0;  // how many of the cluster's keys the node before sees
    for (int32_t i = 0; i < plan_.num_nodes; ++i) {
      const int32_t length = (depths_[i] < high ? depths_[i] + 1 : high) - low;
      if (length <= 0) {
        open = false;
        continue;
      }
      Cluster* cluster = clusters_.size() > first ? &clusters_.back() : nullptr;
      if (open && chained[i] && seen_by_last == cluster->num_nodes) {
        if (length > seen_by_last) {
          keys_.push_back(order_[i]);
          ++cluster->num_nodes;
        }
      } else {
        list_members(order_[i], low, high, &members_);
        const int32_t common = cluster ? common_with(*cluster) : 0;
        if (!(open && (common == length || common == cluster->num_nodes))) {
          clusters_.push_back({i, i, 0, cluster ? num_prefix + common : 0, nullptr, 0});
          cluster = &clusters_.back();
          keys_.insert(keys_.end(), members_.begin(), members_.end());
          cluster->num_nodes = length;
        } else if (length > cluster->num_nodes) {
          keys_.insert(keys_.end(), members_.begin() + cluster->num_nodes, members_.end());
          cluster->num_nodes = length;
        }
      }
      open = true;
      seen_by_last = length;
      cluster->end = i + 1;
      cluster->num_keys = num_prefix + cluster->num_nodes;
    }
  }

  // Leading members that are the keys of the last cluster.
  int32_t common_with(const Cluster& cluster) const {
    const int32_t* keys = keys_.data() + keys_.size() - cluster.num_nodes;
    int32_t common = 0;
    while (common < cluster.num_nodes && common < static_cast<int32_t>(members_.size()) &&
           keys[common] == members_[common]) {
      ++common;
    }
    return common;
  }

  int32_t words_;
  std::vector<uint64_t> sets_;
  std::vector<int32_t> sizes_, order_, depths_, first_cluster_, keys_, members_;
  std::vector<Cluster> clusters_;
  Plan plan_{};
};

}  // namespace attention
}  // namespace specdec
