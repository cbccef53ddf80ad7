// Drives the norm and the rotation of a decoder layer, meant to be built with AddressSanitizer and UBSan: all element
// types, borders of vectors and halves, parts of heads. Every buffer ends where the next page must not be touched.
// Results must be those of double, and the same in place.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/decoder_kernel.h"
#include "numbers.h"

namespace {

using namespace specdec;
using namespace specdec::decoder;

double tolerance_of(Element element) {
  return element == Element::kDouble ? 1e-12 : element == Element::kFloat ? 1e-5 : 2e-2;
}

void close(double have, double want, double magnitude, Element element, const char* what) {
  require(std::abs(have - want) <= tolerance_of(element) * magnitude, what);
}

// weight * x / sqrt(mean(x^2) + eps)
std::vector<double> normed(const std::vector<double>& x, const std::vector<double>& weight, double eps) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  std::vector<double> y;
  for (size_t i = 0; i < x.size(); ++i) {
    y.push_back(weight[i] * x[i] / std::sqrt(squares / static_cast<double>(x.size()) + eps));
  }
  return y;
}

void try_norm(Element element, const Kernel& kernel, int64_t width) {
  const Numbers x(element, width), weight(element, width), out(element, width);
  kernel.rms_norm(x.data(), {weight.data(), 1e-5}, width, out.data());
  const std::vector<double> want = normed(x.values, weight.values, 1e-5);
  for (int64_t i = 0; i < width; ++i) close(out.at(i), want[i], std::abs(want[i]), element, "a norm");
}

void try_rotation(Element element, const Kernel& kernel, int64_t dim, int64_t turned, bool has_norm) {
  const Numbers x(element, dim), weight(element, dim), out(element, dim), cos(element, turned), sin(element, turned);
  const Norm norm{has_norm ? weight.data() : nullptr, 1e-5};
  kernel.rotate(x.data(), norm, {cos.data(), sin.data(), turned}, dim, out.data());
  const std::vector<double> y = has_norm ? normed(x.values, weight.values, 1e-5) : x.values;
  const int64_t half = turned / 2;
  for (int64_t i = 0; i < dim; ++i) {
    const bool is_low = i < half;
    const double partner = i >= turned ? 0 : is_low ? -y[i + half] : y[i - half];
    const double c = i < turned ? cos.values[i] : 1, s = i < turned ? sin.values[i] : 0;
    close(out.at(i), y[i] * c + partner * s, std::abs(y[i] * c) + std::abs(partner * s), element, "a rotation");
  }
  for (int64_t i = 0; i < dim; ++i) require(x.at(i) == x.values[i], "what is read stays");
  kernel.rotate(x.data(), norm, {cos.data(), sin.data(), turned}, dim, x.data());
  require(std::memcmp(x.data(), out.data(), dim * bytes_of(element)) == 0, "a rotation in place");
}

void try_kernel(Element element, const Kernel& kernel) {
  for (const int64_t width : {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 576}) {
    try_norm(element, kernel, width);
    for (const int64_t turned : {width / 2 * 2, width / 4 * 2, int64_t{0}}) {
      try_rotation(element, kernel, width, turned, false);
      try_rotation(element, kernel, width, turned, true);
    }
  }
}

}  // namespace

int main() {
  for (const Element element : {Element::kFloat, Element::kBFloat16, Element::kHalf}) {
    try_kernel(element, *kernel_of(element));
  }
  try_kernel(Element::kDouble, *Row<ArrayVec<double, 4>, double>::kernel());
  std::printf("ok\n");
}
