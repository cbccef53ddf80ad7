// Tensors to the plain structs of tree_attention.h.
#pragma once

#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "cpu/element_of.h"
#include "cpu/tree_attention_plan.h"
#include "cpu/vec.h"

namespace specdec {
namespace attention {

// The best kernel of the instruction sets that may be used.
const Kernel& find_kernel(Element q, Element cache);

struct Options {
  std::optional<double> scale, softcap;
  std::optional<int64_t> window;
  std::optional<Tensor> sinks, k_scale, v_scale;
};

inline void check_rows(const char* name, const Tensor& tensor, const Tensor& q) {
  STD_TORCH_CHECK(tensor.dim() == 4, name, " must have 4 dimensions, got ", tensor.dim());
  STD_TORCH_CHECK(tensor.size(3) >= 1, name, " must not be empty in its last dimension");
  STD_TORCH_CHECK(tensor.size(3) == 1 || tensor.stride(3) == 1, name, " must be contiguous in its last dimension");
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max() / kChunk;
  STD_TORCH_CHECK(tensor.size(2) <= kMax && tensor.size(3) <= kMax, name, " is too wide");
  check_same_device(name, tensor, q);
}

// Values of up to `count` elements of a vector or scalar, as double.
inline std::vector<double> read_numbers(const char* name, const std::optional<Tensor>& tensor, int64_t count,
                                        const Tensor& q) {
  std::vector<double> numbers;
  if (!tensor) return numbers;
  check_same_device(name, *tensor, q);
  STD_TORCH_CHECK(tensor->dim() == 0 || (tensor->dim() == 1 && tensor->size(0) == count), name, " must have ", count,
                  " elements");
  const Element element = floating_element_of(name, *tensor);
  const int64_t stride = tensor->dim() == 0 ? 0 : tensor->stride(0);
  const void* data = tensor->const_data_ptr();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = i * stride;
    switch (element) {
      case Element::kFloat:
        numbers.push_back(static_cast<const float*>(data)[at]);
        break;
      case Element::kDouble:
        numbers.push_back(static_cast<const double*>(data)[at]);
        break;
      case Element::kHalf:
        numbers.push_back(to_float(static_cast<const Half*>(data)[at]));
        break;
      default:
        numbers.push_back(to_float(static_cast<const BFloat16*>(data)[at]));
        break;
    }
  }
  return numbers;
}

inline CacheView view_cache(const Tensor& tensor) {
  const int64_t bytes = static_cast<int64_t>(tensor.element_size());
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.stride(0) * bytes, tensor.stride(1) * bytes,
          tensor.stride(2) * bytes};
}

// One call: the problem, and the numbers it points to.
struct Call {
  Problem problem{};
  int64_t batch;
  std::vector<double> sinks, k_scale, v_scale;
  const int32_t* prefix_len;
  int64_t prefix_stride;
  MaskView mask;
  int64_t mask_batch_stride;

  int64_t prefix(int64_t row) const { return prefix_len[row * prefix_stride]; }
  MaskView mask_of(int64_t row) const {
    MaskView view = mask;
    view.data += row * mask_batch_stride;
    return view;
  }
};

inline void read_sizes(const Tensor& q, const Tensor& k, const Tensor& v, Call* call) {
  check_rows("q", q, q);
  check_rows("k_cache", k, q);
  check_rows("v_cache", v, q);
  Problem& p = call->problem;
  p.q_element = floating_element_of("q", q);
  p.cache_element = element_of("k_cache", k);
  STD_TORCH_CHECK(k.scalar_type() == v.scalar_type(), "k_cache and v_cache must have one dtype");
  STD_TORCH_CHECK(p.cache_element == p.q_element || is_quantised(p.cache_element),
                  "the caches must have the dtype of q, or float8_e4m3fn, or int8");
  STD_TORCH_CHECK(k.size(3) == q.size(3), "q and k_cache differ in their last dimension");
  STD_TORCH_CHECK(k.size(0) == v.size(0) && k.size(1) == v.size(1) && k.size(2) == v.size(2),
                  "k_cache and v_cache must agree");
  STD_TORCH_CHECK(k.size(2) >= 1 && q.size(2) % k.size(2) == 0, "q must have a multiple of k_cache's heads");
  STD_TORCH_CHECK(q.size(1) >= 1 && q.size(1) < (1 << 20), "the number of nodes is out of range");
  call->batch = q.size(0);
  p.num_nodes = static_cast<int32_t>(q.size(1));
  p.num_q_heads = static_cast<int32_t>(q.size(2));
  p.group_size = static_cast<int32_t>(q.size(2) / k.size(2));
  p.qk_dim = static_cast<int32_t>(q.size(3));
  p.v_dim = static_cast<int32_t>(v.size(3));
  const int64_t bytes = static_cast<int64_t>(q.element_size());
  p.q = static_cast<const char*>(q.const_data_ptr());
  for (int i = 0; i < 3; ++i) p.q_strides[i] = q.stride(i) * bytes;
  p.k = view_cache(k);
  p.v = view_cache(v);
}

inline void read_structure(const Tensor& q, const Tensor& tree_mask, const Tensor& prefix_len, Call* call) {
  const int64_t nodes = call->problem.num_nodes, words = (nodes + 63) / 64;
  check_same_device("tree_mask", tree_mask, q);
  check_same_device("prefix_len", prefix_len, q);
  STD_TORCH_CHECK(tree_mask.scalar_type() == torch::headeronly::ScalarType::Long, "tree_mask must be int64");
  STD_TORCH_CHECK(tree_mask.dim() == 3 && (tree_mask.size(0) == 1 || tree_mask.size(0) == call->batch) &&
                      tree_mask.size(1) == nodes && tree_mask.size(2) == words,
                  "tree_mask must have shape (", call->batch, " or 1, ", nodes, ", ", words, ")");
  check_int32("prefix_len", prefix_len, 1, call->batch);
  call->prefix_len = static_cast<const int32_t*>(prefix_len.const_data_ptr());
  call->prefix_stride = prefix_len.stride(0);
  call->mask = {static_cast<const int64_t*>(tree_mask.const_data_ptr()), tree_mask.stride(1), tree_mask.stride(2),
                static_cast<int32_t>(nodes)};
  call->mask_batch_stride = tree_mask.size(0) == 1 ? 0 : tree_mask.stride(0);
}

inline void read_options(const Tensor& q, const Options& options, Call* call) {
  Problem& p = call->problem;
  p.scale = options.scale ? *options.scale : 1.0 / __builtin_sqrt(static_cast<double>(p.qk_dim));
  p.softcap = options.softcap ? *options.softcap : 0.0;
  p.window = options.window ? *options.window : 0;
  STD_TORCH_CHECK(!options.softcap || p.softcap > 0, "softcap must be > 0, got ", p.softcap);
  STD_TORCH_CHECK(!options.window || p.window >= 1, "window must be >= 1, got ", p.window);
  call->sinks = read_numbers("sinks", options.sinks, p.num_q_heads, q);
  call->k_scale = read_numbers("k_scale", options.k_scale, p.num_q_heads / p.group_size, q);
  call->v_scale = read_numbers("v_scale", options.v_scale, p.num_q_heads / p.group_size, q);
  p.sinks = options.sinks ? call->sinks.data() : nullptr;
  p.k_scale = options.k_scale ? call->k_scale.data() : nullptr;
  p.v_scale = options.v_scale ? call->v_scale.data() : nullptr;
}

// What Python cannot check under torch.compile: a wrong length or page would be read out of bounds.
inline void check_prefixes(const Call& call, int64_t capacity) {
  for (int64_t row = 0; row < call.batch; ++row) {
    const int64_t prefix = call.prefix(row);
    STD_TORCH_CHECK(prefix >= 0 && prefix + call.problem.num_nodes <= capacity, "prefix_len must be in [0, ",
                    capacity - call.problem.num_nodes, "], got ", prefix);
  }
}

inline void check_pages(const Call& call, int64_t num_pages) {
  const Problem& p = call.problem;
  for (int64_t row = 0; row < call.batch; ++row) {
    const int64_t needed = (call.prefix(row) + p.num_nodes + p.page_size - 1) / p.page_size;
    for (int64_t i = 0; i < needed; ++i) {
      const int64_t page = p.block_table[row * p.table_strides[0] + i * p.table_strides[1]];
      STD_TORCH_CHECK(page >= 0 && page < num_pages, "block_table must be in [0, ", num_pages - 1, "], got ", page);
    }
  }
}

// Nodes that see nothing, the padding: out = 0, lse = the sink or -inf.
template <class Real>
void write_padding_as(const Call& call, const std::vector<std::unique_ptr<Planner>>& plans, int64_t out_bytes) {
  const Problem& p = call.problem;
  for (int64_t b = 0; b < call.batch; ++b) {
    const Plan& plan = plans[b]->plan();
    if (plan.num_nodes == p.num_nodes) continue;
    std::vector<char> seen(p.num_nodes, 0);
    for (int32_t i = 0; i < plan.num_nodes; ++i) seen[plan.nodes[i]] = 1;
    for (int32_t node = 0; node < p.num_nodes; ++node) {
      if (seen[node]) continue;
      const int64_t at = (b * p.num_nodes + node) * p.num_q_heads;
      std::memset(p.out + at * p.v_dim * out_bytes, 0, p.num_q_heads * p.v_dim * out_bytes);
      for (int32_t h = 0; h < p.num_q_heads; ++h) {
        static_cast<Real*>(p.lse)[at + h] = static_cast<Real>(p.sinks ? p.sinks[h] : -__builtin_inf());
      }
    }
  }
}

inline void write_padding(const Call& call, const std::vector<std::unique_ptr<Planner>>& plans, int64_t out_bytes) {
  if (call.problem.q_element == Element::kDouble) {
    write_padding_as<double>(call, plans, out_bytes);
  } else {
    write_padding_as<float>(call, plans, out_bytes);
  }
}

}  // namespace attention
}  // namespace specdec
