// exp, tanh, sigmoid and softplus on vectors. Within 2 ulp of the true value; NaN stays NaN, exp(-inf) = 0.
#pragma once
#include "simd.h"

template <typename T> struct ExpRule;
template <> struct ExpRule<float> {
  static constexpr float low = -105.0f, high = 88.8f;
  static constexpr float ln2_high = 0.693145751953125f, ln2_low = 1.42860677e-6f;
  static constexpr int bits = 23, bias = 127;
  // exp(r) - 1 - r over r^2, |r| <= ln2 / 2
  static constexpr float c[] = {1.9841270e-4f, 1.3888889e-3f, 8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f, 0.5f};
};
template <> struct ExpRule<double> {
  static constexpr double low = -746.0, high = 709.9;
  static constexpr double ln2_high = 6.93147180369123816490e-01, ln2_low = 1.90821492927058770002e-10;
  static constexpr int bits = 52, bias = 1023;
  static constexpr double c[] = {1.0 / 87178291200.0, 1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
                                 1.0 / 5040.0,        1.0 / 720.0,        1.0 / 120.0,      1.0 / 24.0,      1.0 / 6.0,       0.5};
};

// 2^n for integer vectors whose result is a normal number.
template <typename T> K3_INLINE Vec<T> power_of_two(Int<T> n) {
  return bits<Vec<T>>((n + ExpRule<T>::bias) << ExpRule<T>::bits);
}

template <typename T> K3_INLINE Vec<T> vexp(Vec<T> x) {
  using R = ExpRule<T>;
  Vec<T> z = select(x < R::low, fill<T>(R::low), x);
  z = select(z > R::high, fill<T>(R::high), z);
  const Vec<T> safe = select(z == z, z, fill<T>(0));
  Vec<T> k = safe * T(1.4426950408889634);
  const Int<T> n = convert<Int<T>>(k + select(k < T(0), fill<T>(T(-0.5)), fill<T>(T(0.5))));
  k = convert<Vec<T>>(n);
  const Vec<T> r = (safe - k * R::ln2_high) - k * R::ln2_low;
  Vec<T> p = fill<T>(R::c[0]);
  for (unsigned i = 1; i < sizeof R::c / sizeof R::c[0]; ++i) p = p * r + R::c[i];
  p = p * r * r + r + T(1);
  // two factors, so that results below the normal numbers and above the largest round as they should
  const Int<T> half = n >> 1;
  const Vec<T> y = p * power_of_two<T>(half) * power_of_two<T>(n - half);
  return select(x == x, y, x);
}

template <typename T> K3_INLINE Vec<T> vsigmoid(Vec<T> x) { return T(1) / (T(1) + vexp<T>(-x)); }

// Small arguments by the odd polynomial of tanh's continued fraction, the others by exp.
template <typename T> K3_INLINE Vec<T> vtanh(Vec<T> x) {
  const Vec<T> e = vexp<T>(x * T(2));
  const Vec<T> far = T(1) - T(2) / (e + T(1));
  const Vec<T> s = x * x;
  Vec<T> near;
  if constexpr (sizeof(T) == 4) {
    near = fill<T>(-5.70498872745e-3f);
    near = near * s + 2.06390887954e-2f;
    near = near * s - 5.37397155531e-2f;
    near = near * s + 1.33314422036e-1f;
    near = near * s - 3.33332819422e-1f;
    near = near * s * x + x;
  } else {
    Vec<T> p = fill<T>(-9.64399179425052238628e-1), q = s + T(1.12811678491632931402e2);
    p = p * s - T(9.92877231001918586564e1);
    p = p * s - T(1.61468768441708447952e3);
    q = q * s + T(2.23548839060100448583e3);
    q = q * s + T(4.84406305325125486048e3);
    near = x + x * s * p / q;
  }
  return select(s < T(0.625 * 0.625), near, far);
}

// log(1 + exp x), x itself above 20 as in torch; lane by lane: only gates without a lower bound need it.
template <typename T> K3_INLINE Vec<T> vsoftplus(Vec<T> x) {
  T lanes[Lanes<T>::n];
  store(lanes, x);
  for (T& lane : lanes) lane = lane > T(20) ? lane : std::log1p(std::exp(lane));
  return load(lanes);
}
