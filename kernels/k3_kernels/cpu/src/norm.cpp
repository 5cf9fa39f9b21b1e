// RMSNorm of rows: k3_kernels.reference.norm.
#include "math.h"

template <typename T> static T inverse_rms(const T* x, i64 n, T eps) {
  return T(1) / std::sqrt(dot(x, x, n) * (T(1) / T(n)) + eps);
}

template <typename T> static void k3_rms_norm(const T* x, i64 x_stride, const T* weight, T* y, i64 rows, i64 n, double eps) {
  for (i64 r = 0; r < rows; ++r, x += x_stride, y += n) {
    const T scale = inverse_rms(x, n, T(eps));
    over<T>(n, y, [&](auto at) { return at(x) * scale * at(weight); });
  }
}
K3_BOTH(k3_rms_norm, (const T* x, i64 x_stride, const T* weight, T* y, i64 rows, i64 n, double eps),
        (x, x_stride, weight, y, rows, n, eps))
