// Random numbers in guarded memory, for the drivers.
#pragma once

#include <initializer_list>
#include <random>
#include <vector>

#include "guarded.h"

inline std::mt19937 rng(5);

inline int64_t below(int64_t bound) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(bound)); }
inline int64_t pick(std::initializer_list<int64_t> values) {
  return values.begin()[below(static_cast<int64_t>(values.size()))];
}

// Numbers between -1 and 1, rounded to the element.
class Numbers {
 public:
  Numbers(specdec::Element element, int64_t count)
      : element_(element),
        memory_(static_cast<size_t>(count * specdec::bytes_of(element))),
        values(static_cast<size_t>(count)) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int64_t i = 0; i < count; ++i) values[i] = store_floating(element_, data(i), uniform(rng));
  }
  char* data(int64_t i = 0) const { return memory_.data() + i * specdec::bytes_of(element_); }
  // What is in memory now; `values` are what was there first.
  double at(int64_t i) const {
    using namespace specdec;
    const char* const p = data(i);
    if (element_ == Element::kDouble) return *reinterpret_cast<const double*>(p);
    if (element_ == Element::kFloat) return *reinterpret_cast<const float*>(p);
    if (element_ == Element::kHalf) return to_float(*reinterpret_cast<const Half*>(p));
    return to_float(*reinterpret_cast<const BFloat16*>(p));
  }

 private:
  specdec::Element element_;
  Guarded memory_;

 public:
  std::vector<double> values;
};
