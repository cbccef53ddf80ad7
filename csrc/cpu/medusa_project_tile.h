// Products of weight rows with packed rows of states, for the instruction set of the including translation unit.
//
// Weights are read as they lie, once, kWide rows side by side; packed rows come in panels of kRows:
//   panel[step][row][kStep]     kStep numbers of each row of the panel, then the next kStep
// so a tile reads its panel as one stream. Every product is summed by lanes, in the order of the steps, whatever tile
// it is in.
#pragma once

#include "cpu/medusa_project.h"
#include "cpu/vec.h"

namespace specdec {
namespace medusa {
namespace {

constexpr int kRows = 4;                          // of a panel; the last one may have fewer
constexpr bool kIsWide = FloatVec::kLanes == 16;  // 32 registers: 16 sums, else 16: 8 sums
constexpr int64_t kSteps = 256;                   // that a lane sums before lanes are summed, for precision
constexpr int64_t kAheadBytes = 32 << 10;         // of weights between those in use and those being fetched
constexpr int64_t kPanelsBytes = 20 << 10;        // of panels that should stay in the first-level cache
constexpr int64_t kLargePanelsBytes = 512 << 10;  // or in the second, where the weights would not
constexpr int64_t kWeightsBytes = 384 << 10;

// Rows of weights of a tile: for whole panels, and for a lone one of one or two rows.
constexpr int kWide = kIsWide ? 4 : 2;
constexpr int kWideForOne = kIsWide ? 16 : 2;
constexpr int kWideForTwo = kIsWide ? 8 : 2;

// Weights of type T, everything else in Real.
template <class V>
struct SingleArithmetic {
  using Vec = V;
  using Real = typename V::Real;
  using Operand = Real;
  using OperandVec = V;
  static constexpr int kStep = V::kLanes;

  static SPECDEC_INLINE OperandVec load(const Operand* p) { return V::load(p); }
  template <class T>
  static SPECDEC_INLINE OperandVec load_some(const T* p, int count) {
    return V::load_some(p, count);
  }
  template <class T>
  static SPECDEC_INLINE OperandVec load_step(const T* p) {
    if constexpr (sizeof(T) == sizeof(Real)) {
      return V::load(p);
    } else {
      return V::load_some(p, kStep);
    }
  }
  static SPECDEC_INLINE void store(OperandVec x, Operand* p) { x.store(p); }
  static SPECDEC_INLINE Vec dot(Vec sum, OperandVec a, OperandVec b) { return V::fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
// Pairs of bf16 into sums of fp32.
struct PairArithmetic {
  using Vec = FloatVec;
  using Real = float;
  using Operand = BFloat16;
  using OperandVec = __m512i;
  static constexpr int kStep = 32;

  static SPECDEC_INLINE OperandVec load(const Operand* p) { return _mm512_loadu_si512(p); }
  static SPECDEC_INLINE OperandVec load_some(const BFloat16* p, int count) {
    return _mm512_maskz_loadu_epi16(count >= 32 ? ~0u : (1u << count) - 1u, p);
  }
  static SPECDEC_INLINE OperandVec load_step(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static SPECDEC_INLINE void store(OperandVec x, Operand* p) { _mm512_storeu_si512(p, x); }
  static SPECDEC_INLINE Vec dot(Vec sum, OperandVec a, OperandVec b) {
    // Casts of vectors: GCC takes bit_cast through memory.
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a, (__m512bh)b)};
  }
};
#endif

template <class A>
SPECDEC_INLINE int64_t padded(int64_t width) {
  return (width + A::kStep - 1) / A::kStep * A::kStep;
}

template <class A>
int64_t operand_bytes(int64_t count, int64_t width) {
  return count * padded<A>(width) * static_cast<int64_t>(sizeof(typename A::Operand));
}

template <class A, class T>
void pack(const char* const* rows, int64_t count, int64_t width, void* operands) {
  auto* to = static_cast<typename A::Operand*>(operands);
  for (int64_t first = 0; first < count; first += kRows) {
    const int64_t last = smaller<int64_t>(first + kRows, count);
    for (int64_t c = 0; c < width; c += A::kStep) {
      const int some = static_cast<int>(smaller<int64_t>(A::kStep, width - c));
      for (int64_t row = first; row < last; ++row, to += A::kStep) {
        A::store(A::load_some(reinterpret_cast<const T*>(rows[row]) + c, some), to);
      }
    }
  }
}

// products[j * kChunk + i] (+)= sum of x[j][i]. One order of summation for a kind of vector.
template <class Vec, int kCount, int kWideRows>
SPECDEC_INLINE void sum_each(const Vec (&x)[kCount][kWideRows], bool adds, typename Vec::Real* products) {
  for (int j = 0; j < kCount; ++j) {
    for (int i = 0; i < kWideRows; ++i) {
      const typename Vec::Real sum = x[j][i].sum();
      products[j * kChunk + i] = adds ? products[j * kChunk + i] + sum : sum;
    }
  }
}
#if defined(__AVX512F__)
// In each 128 bits, what the same bits of four vectors sum up to: lanes 0, 2 and 1, 3, then both.
SPECDEC_INLINE __m512 sum_quarters(const Avx512Vec* x) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0].v, x[1].v), _mm512_unpackhi_ps(x[0].v, x[1].v));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2].v, x[3].v), _mm512_unpackhi_ps(x[2].v, x[3].v));
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

template <int kCount, int kWideRows>
SPECDEC_INLINE void sum_each(const Avx512Vec (&x)[kCount][kWideRows], bool adds, float* products) {
  static_assert(kWideRows % 4 == 0 && kCount * kWideRows <= 16);
  constexpr int kGroups = kCount * kWideRows / 4;
  __m512 quarters[4];
  SPECDEC_UNROLL_LOOP
  for (int g = 0; g < 4; ++g) quarters[g] = sum_quarters(&x[0][0] + 4 * smaller(g, kGroups - 1));
  const auto halves = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512 low = halves(quarters[0], quarters[1]), high = halves(quarters[2], quarters[3]);
  float sums[16];
  _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd)));
  SPECDEC_UNROLL_LOOP
  for (int g = 0; g < kGroups; ++g) {
    float* const to = products + g * 4 / kWideRows * kChunk + g * 4 % kWideRows;
    const __m128 four = _mm_loadu_ps(sums + 4 * g);
    _mm_storeu_ps(to, adds ? _mm_add_ps(_mm_loadu_ps(to), four) : four);
  }
}
#endif

// Rows of weights that a tile asks memory for while it multiplies: a later tile reads them.
struct Ahead {
  const char* data;
  int64_t stride;
  int count;
};

// Columns begin ... end - 1 of a tile, added to its products or, the first time, stored.
template <class A, class T, int kCount, int kWideRows>
SPECDEC_INLINE void multiply_columns(const T* const (&weights)[kWideRows], const typename A::Operand* panel,
                                     int64_t begin, int64_t end, const Ahead& ahead, typename A::Real* products) {
  using Vec = typename A::Vec;
  Vec sums[kCount][kWideRows];
  SPECDEC_UNROLL_LOOP
  for (int j = 0; j < kCount; ++j) {
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < kWideRows; ++i) sums[j][i] = Vec::all(0);
  }
  const auto add = [&](int64_t c, const auto& load) __attribute__((always_inline)) {
    typename A::OperandVec rows[kCount];
    SPECDEC_UNROLL_LOOP
    for (int j = 0; j < kCount; ++j) rows[j] = A::load(panel + c * kCount + j * A::kStep);
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < kWideRows; ++i) {
      const typename A::OperandVec weight = load(weights[i] + c);
      SPECDEC_UNROLL_LOOP
      for (int j = 0; j < kCount; ++j) sums[j][i] = A::dot(sums[j][i], weight, rows[j]);
    }
  };
  int64_t c = begin;
  for (; c + A::kStep <= end; c += A::kStep) {
    for (int i = 0; i < ahead.count; ++i) {
      __builtin_prefetch(ahead.data + i * ahead.stride + c * static_cast<int64_t>(sizeof(T)), 0, 2);
    }
    add(c, [](const T* p) __attribute__((always_inline)) { return A::load_step(p); });
  }
  if (c < end) {
    const int rest = static_cast<int>(end - c);
    add(c, [rest](const T* p) __attribute__((always_inline)) { return A::load_some(p, rest); });
  }
  sum_each(sums, begin > 0, products);
}

// A tile: a panel times kWideRows rows of weights.
template <class A, class T, int kCount, int kWideRows = kWide>
void multiply_tile(const Weights& weights, int64_t first, const typename A::Operand* panel, const Ahead& ahead,
                   typename A::Real* products) {
  constexpr int64_t kColumns = kSteps * A::kStep;
  const T* rows[kWideRows];
  SPECDEC_UNROLL_LOOP
  for (int i = 0; i < kWideRows; ++i) {
    rows[i] = reinterpret_cast<const T*>(weights.data + smaller(first + i, weights.count - 1) * weights.stride);
  }
  for (int64_t c = 0; c < weights.width; c += kColumns) {
    multiply_columns<A, T, kCount>(rows, panel, c, smaller(c + kColumns, weights.width), ahead, products);
  }
}

// The rows of weights of a tile times `count` packed rows; products with rows that there are not are anything. Rows
// that come kAheadBytes later, or next, are fetched meanwhile, some with each panel, so that memory is busy all the
// time.
template <class A, class T>
void multiply_wide(const Weights& weights, int64_t first, int64_t wide, const typename A::Operand* panels,
                   int64_t count, bool fetch, typename A::Real* products) {
  const int64_t num_panels = (count + kRows - 1) / kRows, per_panel = (wide + num_panels - 1) / num_panels;
  const int64_t row_bytes = weights.width * static_cast<int64_t>(sizeof(T));
  int64_t next = first + larger<int64_t>(1, kAheadBytes / (row_bytes * wide)) * wide;
  const int64_t end = fetch ? smaller(next + wide, weights.count_ahead) : next;
  for (int64_t row = 0; row < count; row += kRows) {
    const Ahead ahead{weights.data + next * weights.stride, weights.stride,
                      static_cast<int>(larger<int64_t>(0, smaller(per_panel, end - next)))};
    next += per_panel;
    const auto* const panel = panels + row * padded<A>(weights.width);
    auto* const to = products + row * kChunk + first;
    const int64_t rows = count - row;
    if (wide == kWideForOne && rows == 1) {
      multiply_tile<A, T, 1, kWideForOne>(weights, first, panel, ahead, to);
    } else if (wide == kWideForTwo && rows == 2) {
      multiply_tile<A, T, 2, kWideForTwo>(weights, first, panel, ahead, to);
    } else if (rows == 1) {
      multiply_tile<A, T, 1>(weights, first, panel, ahead, to);
    } else if (rows == 2) {
      multiply_tile<A, T, 2>(weights, first, panel, ahead, to);
    } else if (rows == 3) {
      multiply_tile<A, T, 3>(weights, first, panel, ahead, to);
    } else {
      multiply_tile<A, T, kRows>(weights, first, panel, ahead, to);
    }
  }
}

template <class A, class T>
void multiply(const Weights& weights, const void* operands, int64_t count, void* products) {
  const auto* const panels = static_cast<const typename A::Operand*>(operands);
  const bool fits = weights.count * weights.width * static_cast<int64_t>(sizeof(T)) <= kWeightsBytes;
  const int64_t bytes = fits ? kPanelsBytes : kLargePanelsBytes;
  const int64_t block = larger<int64_t>(1, bytes / operand_bytes<A>(kRows, weights.width)) * kRows;
  for (int64_t row = 0; row < count; row += block) {
    const int64_t rows = smaller(block, count - row);
    const int64_t wide = rows == 1 ? kWideForOne : rows == 2 ? kWideForTwo : kWide;
    for (int64_t first = 0; first < weights.count; first += wide) {
      multiply_wide<A, T>(weights, first, wide, panels + row * padded<A>(weights.width), rows, row == 0,
                          static_cast<typename A::Real*>(products) + row * kChunk);
    }
  }
}

}  // namespace
}  // namespace medusa
}  // namespace specdec
