// Memory of the drivers that ends where the next page must not be touched, since sanitizers do not see masked loads.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "cpu/element.h"
#include "cpu/vec.h"

inline void require(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

// Bytes whose end is the end of the last page that may be touched.
class Guarded {
 public:
  explicit Guarded(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (bytes + page - 1) / page * page + page;
    base_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    require(base_ != MAP_FAILED && mprotect(base_ + size_ - page, page, PROT_NONE) == 0, "no memory");
    data_ = base_ + size_ - page - bytes;
  }
  ~Guarded() { munmap(base_, size_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  char* data() const { return data_; }

 private:
  char *base_, *data_;
  size_t size_;
};

// Writes a floating element; returns what it is after rounding.
inline double store_floating(specdec::Element element, char* at, double value) {
  using namespace specdec;
  const float x = static_cast<float>(value);
  if (element == Element::kDouble) return *reinterpret_cast<double*>(at) = value;
  if (element == Element::kFloat) return *reinterpret_cast<float*>(at) = x;
  if (element == Element::kHalf) {
    from_float(x, reinterpret_cast<Half*>(at));
    return to_float(*reinterpret_cast<Half*>(at));
  }
  from_float(x, reinterpret_cast<BFloat16*>(at));
  return to_float(*reinterpret_cast<BFloat16*>(at));
}
