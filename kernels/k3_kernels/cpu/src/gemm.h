// Products with packed weights, y[t, o] = sum over i of x[t, i] w[o, i], for few tokens.
//
// A packed matrix is panels of as many outputs as a vector has lanes. Within a panel inputs follow each other:
//   plain   [panel][input][lane] of T
//   narrow  [panel][input / 2][lane][2] of bfloat16, T = float: half the bytes for weights that lose nothing by it
// Outputs and inputs beyond the matrix are zero. Each output sums even and odd inputs apart, then both: one order,
// however many tokens there are.
#pragma once
#include "simd.h"

template <typename T> struct Matrix {  // blocks.Matrix
  const void* data;
  i64 outputs, inputs, is_narrow;
  static constexpr i64 lanes = Lanes<T>::n;
  i64 panels() const { return (outputs + lanes - 1) / lanes; }
  i64 panel_bytes() const { return 64 * (is_narrow ? (inputs + 1) / 2 : inputs); }
  const char* panel(i64 p) const { return static_cast<const char*>(data) + p * panel_bytes(); }
  i64 bytes() const { return panels() * panel_bytes(); }
};

// Tokens that meet a panel at once: many, so that a weight is unpacked once for all of them (0: never), or fewer and as many
// panels. As many sums as there are registers for beside a weight, or two narrow ones.
#ifdef __AVX512F__
constexpr int MANY_TOKENS = 8, PANELS_AT_ONCE = 2;
template <bool NARROW> constexpr int TOKENS_AT_ONCE = 4;
#else
constexpr int MANY_TOKENS = 0, PANELS_AT_ONCE = 1;
template <bool NARROW> constexpr int TOKENS_AT_ONCE = NARROW ? 2 : 3;
#endif

// Bytes ahead that are asked for while one token meets its weights: reading them is all there is to do.
constexpr i64 AHEAD = 2048;

// The weights of inputs 2 j and 2 j + 1.
template <typename T, bool NARROW> K3_INLINE void load_pair(const char* w, i64 j, Vec<T>& even, Vec<T>& odd) {
  if constexpr (NARROW) {
    const auto both = load(reinterpret_cast<const std::int32_t*>(w + 64 * j));
    even = bits<Vec<T>>(both << 16), odd = bits<Vec<T>>(both & ~0xFFFF);
  } else {
    const T* pair = reinterpret_cast<const T*>(w + 128 * j);
    even = load(pair), odd = load(pair + Lanes<T>::n);
  }
}

template <typename T, bool NARROW, int M, int P>
static inline void tile(const T* x, i64 x_stride, const char* w, i64 panel_bytes, i64 inputs, bool ahead, Vec<T> (&sum)[M][P]) {
  Vec<T> even[M][P] = {}, odd[M][P] = {};
  const i64 pairs = inputs / 2;
  for (i64 j = 0; j < pairs; ++j)
    for (int p = 0; p < P; ++p) {
      if constexpr (M == 1) __builtin_prefetch(w + p * panel_bytes + 64 * (NARROW ? j : 2 * j) + AHEAD);
      else if (ahead) {
        const char* next = w + (p + P) * panel_bytes + 64 * (NARROW ? j : 2 * j);
        __builtin_prefetch(next);
        if (!NARROW) __builtin_prefetch(next + 64);
      }
      Vec<T> a, b;
      load_pair<T, NARROW>(w + p * panel_bytes, j, a, b);
      for (int m = 0; m < M; ++m) {
        even[m][p] += a * x[m * x_stride + 2 * j];
        odd[m][p] += b * x[m * x_stride + 2 * j + 1];
      }
    }
  for (int p = 0; p < P; ++p) {
    if (inputs % 2) {
      Vec<T> a, unused;
      if constexpr (NARROW) load_pair<T, NARROW>(w + p * panel_bytes, pairs, a, unused);
      else a = load(reinterpret_cast<const T*>(w + p * panel_bytes + 128 * pairs));
      for (int m = 0; m < M; ++m) even[m][p] += a * x[m * x_stride + inputs - 1];
    }
    for (int m = 0; m < M; ++m) sum[m][p] = even[m][p] + odd[m][p];
  }
}

template <typename T, bool NARROW, int M, int P>
static inline void tile_out(const T* x, i64 x_stride, const Matrix<T>& w, i64 panel, bool ahead, T* y, i64 y_stride) {
  Vec<T> sum[M][P];
  tile<T, NARROW, M, P>(x, x_stride, w.panel(panel), w.panel_bytes(), w.inputs, ahead, sum);
  for (int p = 0; p < P; ++p) {
    const i64 at = (panel + p) * w.lanes, left = w.outputs - at;
    for (int m = 0; m < M; ++m)
      if (left >= w.lanes) store(y + m * y_stride + at, sum[m][p]);
      else store_part(y + m * y_stride + at, sum[m][p], left);
  }
}

template <typename T, bool NARROW, int P>
static inline void tokens_of(const T* x, i64 x_stride, const Matrix<T>& w, i64 panel, T* y, i64 y_stride, i64 tokens) {
  i64 t = 0;
  if constexpr (MANY_TOKENS > 0)
    for (; t + MANY_TOKENS <= tokens; t += MANY_TOKENS)
      for (int p = 0; p < P; ++p)
        tile_out<T, NARROW, MANY_TOKENS, 1>(x + t * x_stride, x_stride, w, panel + p, t == 0, y + t * y_stride, y_stride);
  constexpr int few = TOKENS_AT_ONCE<NARROW>;
  for (; t + few <= tokens; t += few)
    tile_out<T, NARROW, few, P>(x + t * x_stride, x_stride, w, panel, t == 0, y + t * y_stride, y_stride);
  x += t * x_stride;
  y += t * y_stride;
  if (tokens - t == 1) tile_out<T, NARROW, 1, P>(x, x_stride, w, panel, t == 0, y, y_stride);
  if constexpr (few > 2)
    if (tokens - t == 2) tile_out<T, NARROW, 2, P>(x, x_stride, w, panel, t == 0, y, y_stride);
  if constexpr (few > 3)
    if (tokens - t == 3) tile_out<T, NARROW, 3, P>(x, x_stride, w, panel, t == 0, y, y_stride);
}

template <typename T, bool NARROW>
static void multiply_as(const T* x, i64 x_stride, const Matrix<T>& w, T* y, i64 y_stride, i64 tokens) {
  const i64 panels = w.panels();
  i64 p = 0;
  if (PANELS_AT_ONCE > 1 && tokens > 1)  // one alone reads its weights as they follow each other
    for (; p + PANELS_AT_ONCE <= panels; p += PANELS_AT_ONCE)
      tokens_of<T, NARROW, PANELS_AT_ONCE>(x, x_stride, w, p, y, y_stride, tokens);
  for (; p < panels; ++p) tokens_of<T, NARROW, 1>(x, x_stride, w, p, y, y_stride, tokens);
}

// Tokens whose inputs stay in a core's own cache while all panels are met.
constexpr i64 BLOCK_TOKENS = 256;

template <typename T> static void multiply(const T* x, i64 x_stride, const Matrix<T>& w, T* y, i64 y_stride, i64 tokens) {
  for (i64 t = 0; t < tokens; t += BLOCK_TOKENS) {
    const i64 n = tokens - t < BLOCK_TOKENS ? tokens - t : BLOCK_TOKENS;
    const T* in = x + t * x_stride;
    T* out = y + t * y_stride;
    if constexpr (sizeof(T) == 4) {
      if (w.is_narrow) {
        multiply_as<T, true>(in, x_stride, w, out, y_stride, n);
        continue;
      }
    }
    multiply_as<T, false>(in, x_stride, w, out, y_stride, n);
  }
}
