// Registration of one kernel, together with the argument types its C++ signature has.
//
// With the stable ABI a kernel whose types differ from the op's schema is not refused: it crashes. The types recorded
// here come from the function itself, so the test that compares them with the Python schema cannot be outdated.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace specdec {

// The names torch's schema printer uses.
template <class T>
struct SchemaType;
template <>
struct SchemaType<torch::stable::Tensor> {
  static std::string name() { return "Tensor"; }
};
template <>
struct SchemaType<int64_t> {
  static std::string name() { return "int"; }
};
template <>
struct SchemaType<double> {
  static std::string name() { return "float"; }
};
template <>
struct SchemaType<bool> {
  static std::string name() { return "bool"; }
};
template <class T>
struct SchemaType<std::vector<T>> {
  static std::string name() { return "List[" + SchemaType<T>::name() + "]"; }
};
template <class T>
struct SchemaType<std::optional<T>> {
  static std::string name() { return "Optional[" + SchemaType<T>::name() + "]"; }
};

// Op name -> its argument types, comma-separated.
inline std::map<std::string, std::string>& native_schemas() {
  static std::map<std::string, std::string> schemas;
  return schemas;
}

template <class Result, class... Arguments>
std::string schema_types(Result (*)(Arguments...)) {
  std::string text;
  ((text += (text.empty() ? "" : ", ") + SchemaType<std::remove_cvref_t<Arguments>>::name()), ...);
  return text;
}

}  // namespace specdec

#define SPECDEC_IMPL(library, op, function)                           \
  do {                                                                \
    (library).impl(op, TORCH_BOX(&function));                         \
    specdec::native_schemas()[op] = specdec::schema_types(&function); \
  } while (false)
