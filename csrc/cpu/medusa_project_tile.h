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
constexpr bool kFetches = FloatVec::kLanes > 4;   // without vectors what takes the time is not memory
constexpr bool kIsWide = FloatVec::kLanes == 16;  // 32 registers: up to 24 sums, else 16: 8 sums
constexpr int64_t kSteps = 256;                   // that a lane sums before lanes are summed, for precision
constexpr int64_t kAheadBytes = 16 << 10;         // of weights between those in use and those being fetched
constexpr int64_t kPanelBytes = 16 << 10;         // of a panel that stays in the first-level cache
constexpr int64_t kPanelsBytes = 128 << 10;       // of panels that every tile reads, in the second-level cache
constexpr int64_t kLargePanelsBytes = 512 << 10;  // or, where a chunk of weights does not stay there, too
constexpr int64_t kWeightsBytes = 384 << 10;      // of a chunk that does

// Rows of weights of a tile. Short rows are in the first-level cache when they are multiplied; then as many sums as are
// quick to sum across lanes. Long ones come from the second, as their panels do: more sums for what is loaded.
constexpr int kWide = kIsWide ? 4 : 2;
constexpr int kWideForOne = kIsWide ? 16 : 2;
constexpr int kWideForTwo = kIsWide ? 8 : 2;
constexpr int kWideIfLong = kIsWide ? 6 : 2;

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
SPECDEC_INLINE __m512 sum_quarters(const Avx512Vec& x0, const Avx512Vec& x1, const Avx512Vec& x2, const Avx512Vec& x3) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x0.v, x1.v), _mm512_unpackhi_ps(x0.v, x1.v));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x2.v, x3.v), _mm512_unpackhi_ps(x2.v, x3.v));
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

// Sixteen sums at a time: four groups of four, the last group of a row with fewer.
template <int kCount, int kWideRows>
SPECDEC_INLINE void sum_each(const Avx512Vec (&x)[kCount][kWideRows], bool adds, float* products) {
  constexpr int kPerRow = (kWideRows + 3) / 4, kGroups = kCount * kPerRow;
  const auto halves = [](__m512 a, __m512 b) __attribute__((always_inline)) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  SPECDEC_UNROLL_LOOP
  for (int begin = 0; begin < kGroups; begin += 4) {
    __m512 quarters[4];
    SPECDEC_UNROLL_LOOP
    for (int g = 0; g < 4; ++g) {
      const int group = smaller(begin + g, kGroups - 1), i = group % kPerRow * 4, last = kWideRows - 1;
      const auto& row = x[group / kPerRow];
      quarters[g] =
          sum_quarters(row[i], row[smaller(i + 1, last)], row[smaller(i + 2, last)], row[smaller(i + 3, last)]);
    }
    const __m512 low = halves(quarters[0], quarters[1]), high = halves(quarters[2], quarters[3]);
    float sums[16];
    _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd)));
    SPECDEC_UNROLL_LOOP
    for (int g = 0; g < 4; ++g) {
      if (begin + g == kGroups) break;
      const int group = begin + g, i = group % kPerRow * 4;
      float* const to = products + group / kPerRow * kChunk + i;
      const __m128 four = _mm_loadu_ps(sums + 4 * g);
      if (i + 4 <= kWideRows) {
        _mm_storeu_ps(to, adds ? _mm_add_ps(_mm_loadu_ps(to), four) : four);
      } else {
        const __mmask8 some = (1 << kWideRows % 4) - 1;
        _mm_mask_storeu_ps(to, some, adds ? _mm_add_ps(_mm_maskz_loadu_ps(some, to), four) : four);
      }
    }
  }
}
#endif

// Columns begin ... end - 1 of a tile, added to its products or, the first time, stored. Meanwhile memory is asked for
// the same columns of rows that a later tile reads.
template <class A, class T, int kCount, int kWideRows, int kAhead>
SPECDEC_INLINE void multiply_columns(const T* const (&weights)[kWideRows], const T* const (&ahead)[kAhead + 1],
                                     const typename A::Operand* panel, int64_t begin, int64_t end,
                                     typename A::Real* products) {
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
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < kAhead; ++i) __builtin_prefetch(ahead[i] + c, 0, 2);
    add(c, [](const T* p) __attribute__((always_inline)) { return A::load_step(p); });
  }
  if (c < end) {
    const int rest = static_cast<int>(end - c);
    add(c, [rest](const T* p) __attribute__((always_inline)) { return A::load_some(p, rest); });
  }
  sum_each(sums, begin > 0, products);
}

// A tile: a panel times kWideRows rows of weights, while kAhead rows from `next` on are fetched.
template <class A, class T, int kCount, int kWideRows, int kAhead>
void multiply_tile(const Weights& weights, int64_t first, int64_t next, const typename A::Operand* panel,
                   typename A::Real* products) {
  const auto row_of = [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    return reinterpret_cast<const T*>(weights.data + smaller(i, count - 1) * weights.stride);
  };
  const T *rows[kWideRows], *ahead[kAhead + 1];
  SPECDEC_UNROLL_LOOP
  for (int i = 0; i < kWideRows; ++i) rows[i] = row_of(first + i, weights.count);
  SPECDEC_UNROLL_LOOP
  for (int i = 0; i < kAhead; ++i) ahead[i] = row_of(next + i, weights.count_ahead);
  constexpr int64_t kColumns = kSteps * A::kStep;
  for (int64_t c = 0; c < weights.width; c += kColumns) {
    const int64_t end = smaller(c + kColumns, weights.width);
    multiply_columns<A, T, kCount, kWideRows, kAhead>(rows, ahead, panel, c, end, products);
  }
}

// A tile that fetches num_ahead rows: none, all that a tile has, or, where there are more panels, some.
template <class A, class T, int kCount, int kWideRows>
SPECDEC_INLINE void multiply_panel(const Weights& weights, int64_t first, int64_t next, int64_t num_ahead,
                                   const typename A::Operand* panel, typename A::Real* products) {
  if (kFetches && num_ahead == kWideRows) {
    multiply_tile<A, T, kCount, kWideRows, kFetches ? kWideRows : 0>(weights, first, next, panel, products);
  } else if (!kFetches || kCount < kRows || num_ahead == 0) {
    multiply_tile<A, T, kCount, kWideRows, 0>(weights, first, next, panel, products);
  } else if (num_ahead == 1) {
    multiply_tile<A, T, kCount, kWideRows, kFetches && kCount == kRows ? 1 : 0>(weights, first, next, panel, products);
  } else {
    constexpr int kAhead = kFetches && kCount == kRows ? kWideRows / 2 : 0;
    multiply_tile<A, T, kCount, kWideRows, kAhead>(weights, first, next, panel, products);
  }
}

// Tiles of kWideRows rows of weights times `count` packed rows, kCount at a time; products with rows that there are not
// are anything. Rows that come kAheadBytes later, or next, are fetched meanwhile, some with each whole panel, so that
// memory is busy all the time.
template <class A, class T, int kWideRows, int kCount = kRows>
void multiply_block(const Weights& weights, const typename A::Operand* panels, int64_t count, bool fetch,
                    typename A::Real* products) {
  const int64_t tile_bytes = weights.width * static_cast<int64_t>(sizeof(T)) * kWideRows;
  const int64_t distance = larger<int64_t>(1, kAheadBytes / tile_bytes) * kWideRows;
  const int64_t num_whole = count / kCount;
  const int64_t step = num_whole < 2 ? kWideRows : num_whole < kWideRows ? kWideRows / 2 : 1;
  for (int64_t first = 0; first < weights.count; first += kWideRows) {
    int64_t next = first + distance;
    const int64_t end = fetch ? smaller(next + kWideRows, weights.count_ahead) : next;
    for (int64_t row = 0; row < count; row += kCount, next += step) {
      const auto* const panel = panels + row * padded<A>(weights.width);
      auto* const to = products + row * kChunk + first;
      const int64_t rows = count - row, num_ahead = next < end ? step : 0;
      if constexpr (kCount < kRows) {
        multiply_panel<A, T, kCount, kWideRows>(weights, first, next, num_ahead, panel, to);
      } else if (rows >= kRows) {
        multiply_panel<A, T, kRows, kWideRows>(weights, first, next, num_ahead, panel, to);
      } else if (rows == 3) {
        multiply_panel<A, T, 3, kWideRows>(weights, first, next, num_ahead, panel, to);
      } else if (rows == 2) {
        multiply_panel<A, T, 2, kWideRows>(weights, first, next, num_ahead, panel, to);
      } else {
        multiply_panel<A, T, 1, kWideRows>(weights, first, next, num_ahead, panel, to);
      }
    }
  }
}

template <class A, class T>
void multiply(const Weights& weights, const void* operands, int64_t count, void* products) {
  const auto* const panels = static_cast<const typename A::Operand*>(operands);
  const int64_t panel_bytes = operand_bytes<A>(kRows, weights.width);
  const bool fits = weights.count * weights.width * static_cast<int64_t>(sizeof(T)) <= kWeightsBytes;
  const int64_t block = larger<int64_t>(1, (fits ? kPanelsBytes : kLargePanelsBytes) / panel_bytes) * kRows;
  for (int64_t row = 0; row < count; row += block) {
    const auto* const some = panels + row * padded<A>(weights.width);
    auto* const to = static_cast<typename A::Real*>(products) + row * kChunk;
    const int64_t rows = smaller(block, count - row);
    if (panel_bytes > kPanelBytes) {
      multiply_block<A, T, kWideIfLong>(weights, some, rows, row == 0, to);
    } else if (rows == 1) {
      multiply_block<A, T, kWideForOne, 1>(weights, some, rows, row == 0, to);
    } else if (rows == 2) {
      multiply_block<A, T, kWideForTwo, 2>(weights, some, rows, row == 0, to);
    } else {
      multiply_block<A, T, kWide>(weights, some, rows, row == 0, to);
    }
  }
}

}  // namespace
}  // namespace medusa
}  // namespace specdec
