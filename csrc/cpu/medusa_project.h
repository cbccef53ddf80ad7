// Medusa heads on the CPU: what the parts share. Plain data, no torch; docs/medusa_project.md explains the kernel.
#pragma once

#include <cstdint>

#include "cpu/element.h"

namespace specdec {
namespace medusa {

// Weight rows multiplied at a time. The log-sum-exp of a row follows these borders and nothing else: not the batch, not
// the threads. A product's bits depend on the two rows it multiplies only.
constexpr int64_t kChunk = 192;

// Of one product.
constexpr int64_t product_bytes(Element element) { return element == Element::kDouble ? 8 : 4; }

// Rows of weights, up to kChunk of them; the stride is in bytes. `count_ahead` rows, at least `count`, are about to be
// read.
struct Weights {
  const char* data;
  int64_t stride;
  int64_t count;
  int64_t count_ahead;
  int64_t width;
};

// Of the logits of one row and one chunk: sum of exp(logit - shift), shift the largest, or the nearest finite number.
struct LogSum {
  float shift;
  float sum;
};

// `products` hold one row of kChunk numbers for each row of operands: double for kDouble, else float.
struct Kernel {
  int64_t (*operand_bytes)(int64_t count, int64_t width);
  // Lays `count` rows out as `multiply` reads them.
  void (*pack)(const char* const* rows, int64_t count, int64_t width, void* operands);
  // products[row * kChunk + i] = rows[row] . weights[i]
  void (*multiply)(const Weights& weights, const void* operands, int64_t count, void* products);
  // out = x + SiLU(products + bias), rounded once; `bias` may be null.
  void (*finish_layer)(const void* products, const char* bias, const char* x, int64_t count, char* out);
  // out = products + bias, rounded, then + residual, rounded; `bias` and `residual` may be null.
  void (*finish_linear)(const void* products, const char* bias, const char* residual, int64_t count, char* out);
  // out = SiLU(gate + bias) * (up + bias): the two sums are rounded, then SiLU, then the product.
  void (*finish_gated)(const void* gate, const char* gate_bias, const void* up, const char* up_bias, int64_t count,
                       char* out);
  void (*store)(const void* products, int64_t count, char* out);
  // Rounds products to the element, sums them, and lets them into the `k` best keys, which descend.
  LogSum (*rank)(const void* products, int64_t count, int64_t first_id, int64_t* keys, int64_t k);
};

// The kernel of a translation unit, or null when it has none for this element.
const Kernel* find_kernel_avx512_bf16(Element element);
const Kernel* find_kernel_avx512(Element element);
const Kernel* find_kernel_avx2(Element element);
const Kernel* find_kernel_plain(Element element);

}  // namespace medusa
}  // namespace specdec
