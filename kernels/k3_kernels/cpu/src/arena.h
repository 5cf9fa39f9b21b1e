// Working memory of a call: one growing piece per thread and level, handed out from its start by every call anew. An
// operation works at level 0, a block that calls operations at level 1, what calls blocks at level 2.
#pragma once
#include <vector>

#include "simd.h"

class Arena {
 public:
  explicit Arena(int level = 0) : memory_(thread_memory(level)) {}
  // n values, aligned to a vector; all pieces of a call are asked for at once, through `reserve`.
  template <typename T> void reserve(i64 n) {
    if (i64(memory_.size()) < i64(n * sizeof(T)) + 64) memory_.resize(n * sizeof(T) + 64);
    at_ = (64 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 64) % 64;
  }
  template <typename T> T* take(i64 n) {
    T* piece = reinterpret_cast<T*>(memory_.data() + at_);
    at_ += (n * sizeof(T) + 63) / 64 * 64;
    return piece;
  }

 private:
  static std::vector<char>& thread_memory(int level) {
    static thread_local std::vector<char> memory[3];
    return memory[level];
  }
  std::vector<char>& memory_;
  i64 at_ = 0;
};

// What `take` uses up for n values.
template <typename T> constexpr i64 aligned(i64 n) { return (n * i64(sizeof(T)) + 63) / 64 * 64 / i64(sizeof(T)); }
