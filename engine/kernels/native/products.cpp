// The products as a C function. This file is part of cpu_kernels.cpp, and a library by itself that
// compiles in a quarter of the time: only products differ on a CPU without some instructions.

#include "products.h"

// Rows are bfloat16. `weight` is a Weight of weights.h. `finish` is 0 to write, 1 to add to `out`, 2
// for silu(gate) * up. `out` is bfloat16, or with `is_wide` float32, which 2 does not support.
extern "C" int millrace_multiply(const void* rows, const void* weight, void* out, int64_t num_rows,
                                 int64_t num_inputs, int64_t num_outputs, int finish,
                                 int is_wide) {
  if (finish < 0 || finish > 2 || (is_wide && finish == 2)) return 1;
  Product product{rows, static_cast<const Weight*>(weight), nullptr, num_rows,
                  num_inputs, num_outputs, static_cast<Finish>(finish)};
  if (is_wide) {
    product.wide = static_cast<float*>(out);
  } else {
    product.out = static_cast<BFloat16*>(out);
  }
  multiply(product);
  return 0;
}
