// Tree attention on the CPU: what the parts share. Plain data, no torch; docs/tree_attention.md explains the kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/element.h"

namespace specdec {
namespace attention {

// Logical key positions are cut into chunks, and chunks into groups, both aligned at position 0. The arithmetic of a
// row follows these borders and nothing else: not the tasks, not the threads.
constexpr int kChunk = 64;
constexpr int kChunksPerGroup = 8;

// Strides in bytes. Dense: outer = batch row, inner = position. Paged: outer = page, inner = slot.
struct CacheView {
  const char* data;
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t head_stride;
};

struct Problem {
  const char* q;
  int64_t q_strides[3];  // batch row, node, head; bytes
  char* out;             // (batch, num_nodes, num_q_heads, v_dim), contiguous
  void* lse;             // (batch, num_nodes, num_q_heads), contiguous; double for kDouble, else float
  CacheView k;
  CacheView v;
  Element q_element;
  Element cache_element;
  const int32_t* block_table;  // null: dense
  int64_t table_strides[2];    // elements
  int64_t page_size;
  int32_t num_nodes;
  int32_t num_q_heads;
  int32_t group_size;  // query heads of one KV head
  int32_t qk_dim;
  int32_t v_dim;
  double scale;
  double softcap;         // 0: none
  int64_t window;         // 0: none
  const double* sinks;    // (num_q_heads) or null
  const double* k_scale;  // (KV heads) or null
  const double* v_scale;
};

// Nodes begin ... end - 1 of the plan's order see in this chunk a beginning of the same list of keys.
struct Cluster {
  int32_t begin;
  int32_t end;
  int32_t num_keys;      // of the longest list
  int32_t num_common;    // leading keys that it shares with the cluster before it in the same chunk; 0 for the first
  const int32_t* nodes;  // of the keys in the draft block; keys before them are the last rows of the prefix
  int32_t num_nodes;
};

// What is to be computed for one batch row, apart from the chunks that the prefix fills. Nodes are in depth-first
// order, first children first, padding left out.
struct Plan {
  int64_t prefix;
  int32_t num_nodes;
  const int32_t* nodes;
  const int32_t* depths;
  int32_t num_tail_chunks;       // from chunk prefix / kChunk on
  const int32_t* first_cluster;  // (num_tail_chunks + 1)
  const Cluster* clusters;
};

// Rows row_begin ... row_end - 1 of one KV head, row = (place in the plan's order) * group_size + query head, over the
// key groups group_begin ... group_end - 1. Without `partials` these are all groups, and the result is final.
struct Task {
  int32_t batch;
  int32_t head;
  int32_t row_begin;
  int32_t row_end;
  int32_t group_begin;
  int32_t group_end;
  void* partials;  // of all groups of these rows
};

struct Kernel {
  size_t (*workspace_bytes)(const Problem&, int32_t num_rows);
  size_t (*partial_bytes)(const Problem&, int32_t num_rows);  // of one group
  void (*attend)(const Problem&, const Plan&, const Task&, void* workspace);
  // Merges groups 0 ... group_end - 1 of the task's partials, in order, and writes the result.
  void (*merge)(const Problem&, const Plan&, const Task&, void* workspace);
};

// The kernel of a translation unit, or null when it has none for these elements.
const Kernel* find_kernel_avx512_bf16(Element q, Element cache);
const Kernel* find_kernel_avx512(Element q, Element cache);
const Kernel* find_kernel_avx2(Element q, Element cache);
const Kernel* find_kernel_plain(Element q, Element cache);

}  // namespace attention
}  // namespace specdec
