// Norms and activations of rows: k3_kernels.reference.norm.
#include "math.h"
#include "rows.h"

template <typename T> static void k3_rms_norm(const T* x, i64 x_stride, const T* weight, T* y, i64 rows, i64 n, double eps) {
  for (i64 r = 0; r < rows; ++r, x += x_stride, y += n) rms_norm(x, weight, y, n, T(eps));
}
K3_BOTH(k3_rms_norm, (const T* x, i64 x_stride, const T* weight, T* y, i64 rows, i64 n, double eps),
        (x, x_stride, weight, y, rows, n, eps))

// Row (t, h) of the gate lies at t * gate_stride + h * n; x and y are [tokens, heads, n].
template <typename T>
static void k3_gated_rms_norm(const T* x, const T* gate, i64 gate_stride, const T* weight, T* y, i64 tokens, i64 heads, i64 n, double eps) {
  for (i64 t = 0; t < tokens; ++t)
    for (i64 h = 0; h < heads; ++h, x += n, y += n) gated_rms_norm(x, gate + t * gate_stride + h * n, weight, y, n, T(eps));
}
K3_BOTH(k3_gated_rms_norm, (const T* x, const T* gate, i64 gate_stride, const T* weight, T* y, i64 tokens, i64 heads, i64 n, double eps),
        (x, gate, gate_stride, weight, y, tokens, heads, n, eps))

template <typename T> static void k3_gate(const T* x, const T* gate, i64 gate_stride, T* y, i64 rows, i64 n) {
  for (i64 r = 0; r < rows; ++r, x += n, gate += gate_stride, y += n)
    over<T>(n, y, [&](auto at) { return at(x) * vsigmoid<T>(at(gate)); });
}
K3_BOTH(k3_gate, (const T* x, const T* gate, i64 gate_stride, T* y, i64 rows, i64 n), (x, gate, gate_stride, y, rows, n))

template <typename T> static void k3_situ(const T* gate_up, i64 stride, T* y, i64 rows, i64 n, double beta, double linear_beta) {
  for (i64 r = 0; r < rows; ++r, gate_up += stride, y += n) situ(gate_up, gate_up + n, y, n, T(beta), T(linear_beta));
}
K3_BOTH(k3_situ, (const T* gate_up, i64 stride, T* y, i64 rows, i64 n, double beta, double linear_beta),
        (gate_up, stride, y, rows, n, beta, linear_beta))
