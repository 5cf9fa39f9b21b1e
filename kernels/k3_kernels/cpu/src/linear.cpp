// Projections with packed weights.
#include "gemm.h"

template <typename T>
static void k3_linear(const T* x, i64 x_stride, const void* weight, i64 is_narrow, T* y, i64 tokens, i64 outputs, i64 inputs) {
  multiply<T>(x, x_stride, Matrix<T>{weight, outputs, inputs, is_narrow}, y, outputs, tokens);
}
K3_BOTH(k3_linear, (const T* x, i64 x_stride, const void* weight, i64 is_narrow, T* y, i64 tokens, i64 outputs, i64 inputs),
        (x, x_stride, weight, is_narrow, y, tokens, outputs, inputs))
