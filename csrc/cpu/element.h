// What the elements of a tensor are, for code that knows no torch.
#pragma once

#include <cstdint>

namespace specdec {

enum class Element : uint8_t { kFloat, kBFloat16, kHalf, kDouble, kFloat8, kInt8 };

constexpr bool is_quantised(Element element) { return element == Element::kFloat8 || element == Element::kInt8; }

constexpr int64_t bytes_of(Element element) {
  return element == Element::kDouble ? 8 : element == Element::kFloat ? 4 : is_quantised(element) ? 1 : 2;
}

}  // namespace specdec
