// Whole decoder layers on the CPU, torch-free: their stages, one after the other, by threads that are woken once.
//
//   norm → Wq Wk Wv → rotary, cache → attention → Wo + residual → norm → Wgate Wup → Wdown + residual
//
// Every stage does what the op of the same name does, to the bit.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "cpu/decoder_write.h"
#include "cpu/linear.h"
#include "cpu/team.h"
#include "cpu/tree_attention_schedule.h"

namespace specdec {
namespace layers {

enum Projection { kQ, kK, kV, kO, kGate, kUp, kDown, kNumProjections };

struct Layer {
  decoder::Norm attention_norm, mlp_norm;
  linear::Matrix matrices[kNumProjections];  // each of the same size in all layers
  decoder::Write write;
  attention::Problem problem;
  attention::Schedule* schedule;
};

// Buffers of a step; all rows lie one behind the other.
struct Buffers {
  char* hidden;    // (rows, width): what comes, what goes
  char* normed;    // (rows, width)
  char* qkv;       // (rows, heads of q, k and v, head_dim)
  char* attended;  // (rows, heads of q, head_dim)
  char* middle;    // (rows, width): after attention
  char* gated;     // (rows, width of the MLP)
  char* operands;  // packed rows of any of these
};

struct Step {
  Element element;
  int64_t num_rows;
  int64_t width;
  Buffers buffers;
  std::vector<Layer> layers;
  const medusa::Kernel* products;
  const decoder::Kernel* rows;
};

// One thread's way through all layers.
class Worker {
 public:
  static constexpr int64_t kStagesPerLayer = 10;

  Worker(const Step& step, const Stages& stages, int64_t worker)
      : step_(step),
        item_(bytes_of(step.element)),
        member_(stages, worker),
        qkv_(*this, step.buffers.normed, step.buffers.qkv, {kQ, kK, kV}),
        out_(*this, step.buffers.attended, step.buffers.middle, {kO}, step.buffers.hidden),
        gated_(*this, step.buffers.normed, step.buffers.gated, {kGate, kUp}),
        down_(*this, step.buffers.gated, step.buffers.hidden, {kDown}, step.buffers.middle) {}

  void run(attention::Workspace* workspace) {
    size_t bytes = 0;
    for (const Multiplication* m : {&qkv_, &out_, &gated_, &down_}) {
      bytes = std::max(bytes, static_cast<size_t>(m->run.product_bytes()));
    }
    for (const Layer& layer : step_.layers) bytes = std::max(bytes, layer.schedule->workspace_bytes());
    memory_ = static_cast<char*>(workspace->reserve(bytes));
    for (const Layer& layer : step_.layers) run_layer(layer);
  }

 private:
  // One of the four products of a layer with its matrices.
  struct Multiplication {
    Multiplication(const Worker& worker, char* from, char* to, std::vector<Projection> which, char* residual = nullptr)
        : projections(std::move(which)),
          call(worker.call_of(from, to, projections, residual)),
          run(*worker.step_.products, call, worker.step_.buffers.operands) {}

    void choose(const Layer& layer) {
      for (size_t i = 0; i < projections.size(); ++i) call.matrices[i] = layer.matrices[projections[i]];
    }

    std::vector<Projection> projections;
    linear::Call call;
    linear::Run run;
  };

  linear::Call call_of(char* from, char* to, const std::vector<Projection>& projections, char* residual) const {
    const Layer& first = step_.layers[0];
    linear::Call call{};
    call.element = step_.element;
    call.is_gated = projections[0] == kGate;
    int64_t width = 0;
    for (const Projection i : projections) {
      call.matrices.push_back(first.matrices[i]);
      width += first.matrices[i].count;
    }
    call.width = width_into(projections[0]);
    call.out = to;
    call.out_stride = (call.is_gated ? width / 2 : width) * item_;
    for (int64_t row = 0; row < step_.num_rows; ++row) {
      call.rows.push_back(from + row * call.width * item_);
      if (residual) call.residual.push_back(residual + row * step_.width * item_);
    }
    return call;
  }

  int64_t width_into(Projection projection) const {
    const Layer& first = step_.layers[0];
    return projection == kO ? first.matrices[kQ].count : projection == kDown ? first.matrices[kUp].count : step_.width;
  }

  void run_layer(const Layer& layer) {
    normalise(layer.attention_norm, step_.buffers.hidden, qkv_);
    multiply(layer, &qkv_);
    member_.run(step_.num_rows, [&](int64_t i) { layer.write.node(*step_.rows, i); });
    attention::Schedule* const schedule = layer.schedule;
    member_.run(schedule->num_tasks(), [&](int64_t i) { schedule->run_task(layer.problem, i, memory_); });
    pack(out_);
    multiply(layer, &out_);
    normalise(layer.mlp_norm, step_.buffers.middle, gated_);
    multiply(layer, &gated_);
    pack(down_);
    multiply(layer, &down_);
  }

  void normalise(const decoder::Norm& norm, const char* from, const Multiplication& to) {
    const int64_t bytes = step_.width * item_, rows = to.run.rows_per_pack();
    member_.run(to.run.num_packs(), [&](int64_t part) {
      for (int64_t row = part * rows; row < std::min((part + 1) * rows, step_.num_rows); ++row) {
        step_.rows->rms_norm(from + row * bytes, norm, step_.width, step_.buffers.normed + row * bytes);
      }
      to.run.pack(part);
    });
  }

  void pack(const Multiplication& m) {
    member_.run(m.run.num_packs(), [&](int64_t part) { m.run.pack(part); });
  }

  void multiply(const Layer& layer, Multiplication* m) {
    m->choose(layer);
    member_.run(m->run.num_tasks(), [&](int64_t i) { m->run.work(i, memory_); });
  }

  const Step& step_;
  const int64_t item_;
  Stages::Member member_;
  Multiplication qkv_, out_, gated_, down_;
  char* memory_ = nullptr;
};

}  // namespace layers
}  // namespace specdec
