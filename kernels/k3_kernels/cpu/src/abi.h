// What every exported function shares. Pointers are to contiguous data unless a stride (in values) says otherwise.
#pragma once
#include <cstdint>

#define K3_EXPORT extern "C" __attribute__((visibility("default")))

using i64 = std::int64_t;

// Export NAME_f32 and NAME_f64, both calling the template NAME: PARAMETERS may use T.
#define K3_BOTH(NAME, PARAMETERS, ARGUMENTS)                            \
  namespace f32 { using T = float;  K3_EXPORT void NAME##_f32 PARAMETERS { ::NAME<T> ARGUMENTS; } } \
  namespace f64 { using T = double; K3_EXPORT void NAME##_f64 PARAMETERS { ::NAME<T> ARGUMENTS; } }
