// Likeliest token of rows of logits.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "lanes.h"

namespace {

// First token of the largest logit; -1 if it is infinite or any logit is NaN.
inline int64_t likeliest_of(const float* logits, int64_t count) {
  Floats most = Floats{} - std::numeric_limits<float>::infinity();
  Ints are_numbers = Ints{} - 1;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats values = load(logits + i);
    are_numbers &= values == values;
    most = values > most ? values : most;
  }
  float best = -std::numeric_limits<float>::infinity();
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!are_numbers[lane]) return -1;
    best = most[lane] > best ? most[lane] : best;
  }
  for (; i < count; ++i) {
    const float value = logits[i];
    if (std::isnan(value)) return -1;
    best = value > best ? value : best;
  }
  if (std::isinf(best)) return -1;
  for (i = 0; i + kLanes <= count; i += kLanes) {
    const Ints found = load(logits + i) == best;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (found[lane]) return i + lane;
    }
  }
  while (logits[i] != best) ++i;
  return i;
}

inline void likeliest(const float* logits, int64_t rows, int64_t width, int64_t* tokens) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * width > 262144)
  for (int64_t row = 0; row < rows; ++row) {
    tokens[row] = likeliest_of(logits + row * width, width);
  }
}

}  // namespace
