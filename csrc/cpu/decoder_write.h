// What becomes of a merged projection: q is rotated in place, K and V go to the cache. Plain data, no torch.
#pragma once

#include <cstring>

#include "cpu/decoder.h"

namespace specdec {
namespace decoder {

// One of the tensors of a step: (batch, rows, heads, head_dim). Strides in bytes.
struct Heads {
  char* data;
  int64_t strides[3];

  char* at(int64_t b, int64_t row, int64_t head) const {
    return data + b * strides[0] + row * strides[1] + head * strides[2];
  }
};

// cos and sin: (batch or 1, nodes, dim). Strides in bytes.
struct Angles {
  const char* cos = nullptr;
  const char* sin = nullptr;
  int64_t strides[2] = {0, 0};
  int64_t dim = 0;

  Rotation at(int64_t b, int64_t node) const {
    const int64_t offset = b * strides[0] + node * strides[1];
    return {cos + offset, sin + offset, dim};
  }
};

// Where the nodes of a step go: q is rotated in place, K and V are written behind each row's prefix.
struct Write {
  Heads qkv, keys, values;
  Angles angles;
  Norm q_norm, k_norm;
  const int32_t* lengths;
  int64_t length_stride;
  const int32_t* slots;  // or null: a row's own
  int64_t slot_stride;
  int64_t num_nodes, num_q_heads, num_kv_heads, head_dim, head_bytes;
  int64_t num_slots, capacity;
  int64_t first_node;

  int64_t row_of(int64_t i) const {
    return static_cast<int64_t>(lengths[i / num_nodes * length_stride]) + first_node + i % num_nodes;
  }
  int64_t slot_of(int64_t i) const { return slots ? slots[i / num_nodes * slot_stride] : i / num_nodes; }
  bool fits(int64_t i) const {
    return row_of(i) >= 0 && row_of(i) < capacity && slot_of(i) >= 0 && slot_of(i) < num_slots;
  }

  // Node i % num_nodes of batch row i / num_nodes.
  void node(const Kernel& kernel, int64_t i) const {
    const int64_t b = i / num_nodes, n = i % num_nodes, row = row_of(i), slot = slot_of(i);
    const Rotation rotation = angles.at(b, n);
    for (int64_t head = 0; head < num_q_heads; ++head) {
      char* const q = qkv.at(b, n, head);
      kernel.rotate(q, q_norm, rotation, head_dim, q);
    }
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      kernel.rotate(qkv.at(b, n, num_q_heads + head), k_norm, rotation, head_dim, keys.at(slot, row, head));
      std::memcpy(values.at(slot, row, head), qkv.at(b, n, num_q_heads + num_kv_heads + head), head_bytes);
    }
  }
};

}  // namespace decoder
}  // namespace specdec
