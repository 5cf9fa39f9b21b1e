// One row at a time: the pieces that norms, activations and fused blocks share.
#pragma once
#include "math.h"

template <typename T> K3_INLINE T inverse_rms(const T* x, i64 n, T eps) {
  return T(1) / std::sqrt(dot(x, x, n) * (T(1) / T(n)) + eps);
}

template <typename T> static inline void rms_norm(const T* x, const T* weight, T* y, i64 n, T eps) {
  const T scale = inverse_rms(x, n, eps);
  over<T>(n, y, [&](auto at) { return at(x) * scale * at(weight); });
}

template <typename T> static inline void gated_rms_norm(const T* x, const T* gate, const T* weight, T* y, i64 n, T eps) {
  const T scale = inverse_rms(x, n, eps);
  over<T>(n, y, [&](auto at) { return at(x) * scale * at(weight) * vsigmoid<T>(at(gate)); });
}

// beta tanh(g / beta) sigmoid(g) times the up branch, itself clipped by tanh at linear_beta unless that is 0.
template <typename T> static inline void situ(const T* gate, const T* up, T* y, i64 n, T beta, T linear_beta) {
  const T inverse = T(1) / beta, linear_inverse = linear_beta != T(0) ? T(1) / linear_beta : T(0);
  over<T>(n, y, [&](auto at) {
    const Vec<T> g = at(gate);
    Vec<T> u = at(up);
    if (linear_beta != T(0)) u = vtanh<T>(u * linear_inverse) * linear_beta;
    return vtanh<T>(g * inverse) * beta * vsigmoid<T>(g) * u;
  });
}
