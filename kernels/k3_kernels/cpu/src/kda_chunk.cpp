// One request's prefill chunk of a KDA layer, between its projections: k3_kernels.reference.group.chunks.
// Token by token: a head's state stays in the cache closest to the core, so the recurrence costs less than tiles would,
// and how a prompt is cut into chunks cannot be seen in the result.
#include <memory>
#include <new>

#include "math.h"

namespace {

constexpr i64 BLOCK = 16;  // tokens prepared at once

// Scratch rows are padded with zeros to whole vectors.
template <typename T> i64 padded(i64 n) { return (n + Lanes<T>::n - 1) / Lanes<T>::n * Lanes<T>::n; }

// What a head needs beside its inputs: window [w - 1, 3, D], state [K, V], and of a block of tokens q, k, v and exp(g).
template <typename T> struct Scratch {
  Scratch(i64 dim, i64 kept) : width(padded<T>(dim)), block(BLOCK * width) {
    const i64 n = kept * 3 * dim + dim * width + 4 * block + Lanes<T>::n;
    memory.reset(static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))));
    std::memset(memory.get(), 0, n * sizeof(T));
    state = memory.get();
    q = state + dim * width, k = q + block, v = k + block, decay = v + block, window = decay + block;
  }
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  i64 width, block;
  std::unique_ptr<T, Free> memory;
  T *state, *q, *k, *v, *decay, *window;
};

// The convolution's inputs of one head, rows [3, D]; those before the chunk are the window's.
template <typename T> struct Inputs {
  const T *u, *window;
  i64 stride, kept, row;
  const T* operator[](i64 t) const { return t < 0 ? window + (t + kept) * row : u + t * stride; }
};

// Silu of the convolution at token t, one section. taps: [w, D].
template <typename T> K3_INLINE void convolve(const Inputs<T>& in, i64 t, i64 section, const T* taps, i64 dim, T* y) {
  const i64 from = section * dim;
  over<T>(dim, y, [&](auto at) {
    Vec<T> acc = at(taps) * at(in[t - in.kept] + from);
    for (i64 tap = 1; tap <= in.kept; ++tap) acc += at(taps + tap * dim) * at(in[t - in.kept + tap] + from);
    return acc * vsigmoid<T>(acc);
  });
}

template <typename T> K3_INLINE void scale_row(T* x, i64 width, T factor) {
  for (i64 i = 0; i < width; i += Lanes<T>::n) store(x + i, load(x + i) * factor);
}

// exp of the log decay; the unbounded rule, -decay softplus(x), through libm.
template <typename T> K3_INLINE void gate(const T* raw, const T* bias, T decay, T bound, bool bounded, i64 dim, T* y) {
  if (bounded) {
    over<T>(dim, y, [&](auto at) { return vexp<T>(vsigmoid<T>((at(raw) + at(bias)) * decay) * bound); });
    return;
  }
  for (i64 i = 0; i < dim; ++i) {
    const T x = raw[i] + bias[i];
    y[i] = std::exp(-decay * (x > T(20) ? x : std::log1p(std::exp(x))));
  }
}

// One token into the N vectors of V at `state` (rows of `width` values, one per key channel), and its output.
template <typename T, int N>
K3_INLINE void delta(T* state, i64 width, i64 dim, const T* q, const T* k, const T* decay, const T* v, T beta, T* o) {
  constexpr i64 L = Lanes<T>::n;
  Vec<T> seen[2][N] = {}, out[2][N] = {};
  const auto forget = [&](i64 i, int half) {
    for (int n = 0; n < N; ++n) {
      T* p = state + i * width + n * L;
      const Vec<T> s = load(p) * decay[i];
      seen[half][n] += s * k[i];
      store(p, s);
    }
  };
  const auto learn = [&](i64 i, int half) {
    for (int n = 0; n < N; ++n) {
      T* p = state + i * width + n * L;
      const Vec<T> s = load(p) + seen[0][n] * k[i];
      out[half][n] += s * q[i];
      store(p, s);
    }
  };
  i64 i = 0;
  for (; i + 2 <= dim; i += 2) forget(i, 0), forget(i + 1, 1);
  if (i < dim) forget(i, 0);
  for (int n = 0; n < N; ++n) seen[0][n] = (load(v + n * L) - (seen[0][n] + seen[1][n])) * beta;
  for (i = 0; i + 2 <= dim; i += 2) learn(i, 0), learn(i + 1, 1);
  if (i < dim) learn(i, 0);
  for (int n = 0; n < N; ++n) store(o + n * L, out[0][n] + out[1][n]);
}

}  // namespace

// Token strides in values; within a token rows [H, 3, D] and [H, D] are contiguous. taps: [H, 3, w, D].
// window: [3, D, w - 1], state: [V, K] of a head, at strides of heads; null to start from zeros. o: [T, H, D].
template <typename T>
static void k3_kda_chunk(const T* u, i64 u_stride, const T* raw, i64 raw_stride, const T* beta, i64 beta_stride,
                         const T* taps, const T* bias, const T* decay, double bound, i64 bounded, double eps,
                         const T* window, const T* state, T* next_window, T* next_state, T* o,
                         i64 window_stride, i64 state_stride, i64 tokens, i64 heads, i64 dim, i64 conv) {
  const i64 kept = conv - 1;
  Scratch<T> own(dim, kept);
  const i64 width = own.width;
  const T scale = T(1) / std::sqrt(T(dim));
  T out[4 * Lanes<T>::n];
  for (i64 h = 0; h < heads; ++h) {
    for (i64 i = 0; i < 3 * dim * kept; ++i)
      own.window[i % kept * 3 * dim + i / kept] = window ? window[h * window_stride + i] : T(0);
    for (i64 v = 0; v < dim; ++v)
      for (i64 k = 0; k < dim; ++k) own.state[k * width + v] = state ? state[h * state_stride + v * dim + k] : T(0);
    const Inputs<T> in{u + h * 3 * dim, own.window, u_stride, kept, 3 * dim};
    const T* tap = taps + h * 3 * conv * dim;
    for (i64 lo = 0; lo < tokens; lo += BLOCK) {
      const i64 n = tokens - lo < BLOCK ? tokens - lo : BLOCK;
      for (i64 t = 0; t < n; ++t) {
        T *q = own.q + t * width, *k = own.k + t * width;
        convolve<T>(in, lo + t, 0, tap, dim, q);
        convolve<T>(in, lo + t, 1, tap + conv * dim, dim, k);
        convolve<T>(in, lo + t, 2, tap + 2 * conv * dim, dim, own.v + t * width);
        scale_row(q, width, scale / std::sqrt(dot(q, q, dim) + T(eps)));
        scale_row(k, width, T(1) / std::sqrt(dot(k, k, dim) + T(eps)));
        gate<T>(raw + (lo + t) * raw_stride + h * dim, bias + h * dim, decay[h], T(bound), bounded, dim, own.decay + t * width);
      }
      for (i64 v = 0; v < width;) {
        constexpr i64 L = Lanes<T>::n;
        const i64 vectors = width - v >= 4 * L ? 4 : width - v >= 2 * L ? 2 : 1;
        for (i64 t = 0; t < n; ++t) {
          const i64 row = t * width;
          const T b = T(1) / (T(1) + std::exp(-beta[(lo + t) * beta_stride + h]));
          T* s = own.state + v;
          const T *q = own.q + row, *k = own.k + row, *d = own.decay + row, *x = own.v + row + v;
          if (vectors == 4) delta<T, 4>(s, width, dim, q, k, d, x, b, out);
          else if (vectors == 2) delta<T, 2>(s, width, dim, q, k, d, x, b, out);
          else delta<T, 1>(s, width, dim, q, k, d, x, b, out);
          const i64 left = dim - v < vectors * L ? dim - v : vectors * L;
          std::memcpy(o + ((lo + t) * heads + h) * dim + v, out, left * sizeof(T));
        }
        v += vectors * L;
      }
    }
    for (i64 i = 0; i < 3 * dim * kept; ++i) next_window[h * window_stride + i] = in[tokens - kept + i % kept][i / kept];
    for (i64 v = 0; v < dim; ++v)
      for (i64 k = 0; k < dim; ++k) next_state[h * state_stride + v * dim + k] = own.state[k * width + v];
  }
}
K3_BOTH(k3_kda_chunk,
        (const T* u, i64 u_stride, const T* raw, i64 raw_stride, const T* beta, i64 beta_stride, const T* taps, const T* bias,
         const T* decay, double bound, i64 bounded, double eps, const T* window, const T* state, T* next_window, T* next_state,
         T* o, i64 window_stride, i64 state_stride, i64 tokens, i64 heads, i64 dim, i64 conv),
        (u, u_stride, raw, raw_stride, beta, beta_stride, taps, bias, decay, bound, bounded, eps, window, state, next_window,
         next_state, o, window_stride, state_stride, tokens, heads, dim, conv))
