// A tensor's dtype as Element.
#pragma once

#include "common/check.h"
#include "cpu/element.h"

namespace specdec {

inline Element element_of(const char* name, const Tensor& tensor) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Element::kFloat;
    case ScalarType::BFloat16:
      return Element::kBFloat16;
    case ScalarType::Half:
      return Element::kHalf;
    case ScalarType::Double:
      return Element::kDouble;
    case ScalarType::Float8_e4m3fn:
      return Element::kFloat8;
    case ScalarType::Char:
      return Element::kInt8;
    default:
      STD_TORCH_CHECK(false, name, " has an unsupported dtype");
  }
}

inline Element floating_element_of(const char* name, const Tensor& tensor) {
  const Element element = element_of(name, tensor);
  STD_TORCH_CHECK(!is_quantised(element), name, " must be floating point");
  return element;
}

}  // namespace specdec
