// What a call of the Medusa heads is given, and the machine that it runs on; torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>

#include "cpu/decoder.h"
#include "cpu/medusa_project.h"

namespace specdec {
namespace medusa {

// The block before the heads' own, which sees the embedding of the pending token, too.
struct Root {
  const char* embedding;  // null: there is no such block
  int64_t stride;         // bytes, as below
  const char* weights;    // (width, 2 width)
  int64_t weight_stride;
  const char* bias;  // or null
  const decoder::Kernel* kernel;
};
constexpr double kRootEps = 1e-6;

// Strides in bytes.
struct Call {
  Element element;
  int64_t batch;
  int64_t num_heads;
  int64_t num_layers;
  int64_t width;
  int64_t vocab;
  bool own_projection;
  bool include_base;
  const char* hidden;
  int64_t hidden_stride;
  const char* w_res;
  int64_t w_res_strides[3];  // head, layer, row
  const char* b_res;         // or null
  int64_t b_res_strides[2];  // head, layer
  const char* w_out;
  int64_t w_out_strides[2];  // head (0: shared), row
  Root root;

  int64_t num_outputs() const { return num_heads + include_base; }  // of a batch row
};

// Calls body(worker) for worker = 0 ... workers - 1, each on a thread of its own where there are enough.
using RunWorkers = std::function<void(int64_t workers, const std::function<void(int64_t)>& body)>;

struct Machine {
  const Kernel* kernel;
  int64_t num_threads;
  RunWorkers run;
};

// Uninitialised memory at the start of a cache line.
class Bytes {
 public:
  explicit Bytes(int64_t size) : data_(static_cast<char*>(::operator new(static_cast<size_t>(size), kLine))) {}
  char* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(char* p) const { ::operator delete(p, kLine); }
  };
  std::unique_ptr<char, Free> data_;
};

}  // namespace medusa
}  // namespace specdec
