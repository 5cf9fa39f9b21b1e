// The mixing site of attention residuals: k3_kernels.reference.attnres.
#include "math.h"

// x: token t's candidate j at t * t_stride + j * j_stride. y: [tokens, n].
template <typename T>
static void k3_mix(const T* x, i64 t_stride, i64 j_stride, const T* weight, T* y, i64 tokens, i64 candidates, i64 n, double eps) {
  constexpr i64 most = 64;
  T p[most];
  for (i64 t = 0; t < tokens; ++t, x += t_stride, y += n) {
    T peak = -std::numeric_limits<T>::infinity(), total = 0;
    for (i64 j = 0; j < candidates; ++j) {
      const T* v = x + j * j_stride;
      p[j] = dot(v, weight, n) / std::sqrt(dot(v, v, n) * (T(1) / T(n)) + T(eps));
      peak = p[j] > peak ? p[j] : peak;
    }
    for (i64 j = 0; j < candidates; ++j) total += p[j] = std::exp(p[j] - peak);
    for (i64 j = 0; j < candidates; ++j) p[j] /= total;
    over<T>(n, y, [&](auto at) {
      Vec<T> acc = at(x) * p[0];
      for (i64 j = 1; j < candidates; ++j) acc += at(x + j * j_stride) * p[j];
      return acc;
    });
  }
}
K3_BOTH(k3_mix, (const T* x, i64 t_stride, i64 j_stride, const T* weight, T* y, i64 tokens, i64 candidates, i64 n, double eps),
        (x, t_stride, j_stride, weight, y, tokens, candidates, n, eps))
