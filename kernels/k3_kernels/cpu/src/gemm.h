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

// Tokens that meet a panel at once: many, so that a weight is unpacked once for all of them (0: never), or fewer and two
// panels. As many sums as there are registers for.
#ifdef __AVX512F__
constexpr int MANY_TOKENS = 8, TOKENS_AT_ONCE = 4, PANELS_AT_ONCE = 2;
#else
constexpr int MANY_TOKENS = 0, TOKENS_AT_ONCE = 2, PANELS_AT_ONCE = 1;
#endif

// Bytes ahead that are asked for while one token meets its weights: reading them is all there is to do.
constexpr i64 AHEAD = 2048;

// A vector in pieces of a register: compilers keep what is larger in memory.
#if defined(__AVX512F__)
constexpr i64 REGISTER = 64;
#elif defined(__AVX__)
constexpr i64 REGISTER = 32;
#else
constexpr i64 REGISTER = 16;
#endif
constexpr int PIECES = 64 / REGISTER;
template <typename T> struct Register {
  typedef T V __attribute__((vector_size(REGISTER)));
};
template <typename T> using Piece = typename Register<T>::V;

// A piece of the weights of inputs 2 j and 2 j + 1.
template <typename T, bool NARROW> K3_INLINE void load_pair(const char* w, i64 j, int piece, Piece<T>& even, Piece<T>& odd) {
  w += piece * REGISTER;
  if constexpr (NARROW) {
    Piece<std::int32_t> both;
    std::memcpy(&both, w + 64 * j, REGISTER);
    const Piece<std::int32_t> low = both << 16, high = both & ~0xFFFF;
    std::memcpy(&even, &low, REGISTER);
    std::memcpy(&odd, &high, REGISTER);
  } else {
    std::memcpy(&even, w + 128 * j, REGISTER);
    std::memcpy(&odd, w + 128 * j + 64, REGISTER);
  }
}

template <typename T, bool NARROW, int M, int P>
static inline void tile(const T* x, i64 x_stride, const char* w, i64 panel_bytes, i64 inputs, bool ahead, Vec<T> (&sum)[M][P]) {
  Piece<T> even[M][P][PIECES] = {}, odd[M][P][PIECES] = {};
  const i64 pairs = inputs / 2;
  for (i64 j = 0; j < pairs; ++j)
    for (int p = 0; p < P; ++p) {
      if constexpr (M == 1) __builtin_prefetch(w + p * panel_bytes + 64 * (NARROW ? j : 2 * j) + AHEAD);
      else if (ahead) {
        const char* next = w + (p + P) * panel_bytes + 64 * (NARROW ? j : 2 * j);
        __builtin_prefetch(next);
        if (!NARROW) __builtin_prefetch(next + 64);
      }
      for (int i = 0; i < PIECES; ++i) {
        Piece<T> a, b;
        load_pair<T, NARROW>(w + p * panel_bytes, j, i, a, b);
        for (int m = 0; m < M; ++m) {
          even[m][p][i] += a * x[m * x_stride + 2 * j];
          odd[m][p][i] += b * x[m * x_stride + 2 * j + 1];
        }
      }
    }
  for (int p = 0; p < P; ++p)
    for (int i = 0; i < PIECES; ++i) {
      if (inputs % 2) {
        Piece<T> a;
        if constexpr (NARROW) {
          Piece<T> unused;
          load_pair<T, NARROW>(w + p * panel_bytes, pairs, i, a, unused);
        } else {
          std::memcpy(&a, w + p * panel_bytes + 128 * pairs + i * REGISTER, REGISTER);
        }
        for (int m = 0; m < M; ++m) even[m][p][i] += a * x[m * x_stride + inputs - 1];
      }
      for (int m = 0; m < M; ++m) {
        const Piece<T> both = even[m][p][i] + odd[m][p][i];
        std::memcpy(reinterpret_cast<char*>(&sum[m][p]) + i * REGISTER, &both, REGISTER);
      }
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
  for (; t + TOKENS_AT_ONCE <= tokens; t += TOKENS_AT_ONCE)
    tile_out<T, NARROW, TOKENS_AT_ONCE, P>(x + t * x_stride, x_stride, w, panel, t == 0, y + t * y_stride, y_stride);
  x += t * x_stride;
  y += t * y_stride;
  if (tokens - t == 1) tile_out<T, NARROW, 1, P>(x, x_stride, w, panel, t == 0, y, y_stride);
  if constexpr (TOKENS_AT_ONCE > 2) {
    if (tokens - t == 2) tile_out<T, NARROW, 2, P>(x, x_stride, w, panel, t == 0, y, y_stride);
    if (tokens - t == 3) tile_out<T, NARROW, 3, P>(x, x_stride, w, panel, t == 0, y, y_stride);
  }
}

template <typename T, bool NARROW>
static void multiply_as(const T* x, i64 x_stride, const Matrix<T>& w, T* y, i64 y_stride, i64 tokens) {
  const i64 panels = w.panels();
  i64 p = 0;
  for (; p + PANELS_AT_ONCE <= panels; p += PANELS_AT_ONCE)
    tokens_of<T, NARROW, PANELS_AT_ONCE>(x, x_stride, w, p, y, y_stride, tokens);
  if constexpr (PANELS_AT_ONCE > 1)
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
