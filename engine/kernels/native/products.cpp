// The products as a C function. This file is part of cpu_kernels.cpp, and a library by itself that
// compiles in a quarter of the time: only products differ on a CPU without some instructions.

#include "products.h"

// Supports bfloat16 only. `weight` is a Weight of weights.h. `finish` is 0 to write, 1 to add to
// `out`, 2 for silu(gate) * up.
extern "C" int millrace_multiply(const void* rows, const void* weight, void* out, int64_t num_rows,
                                 int64_t num_inputs, int64_t num_outputs, int finish) {
  if (finish < 0 || finish > 2) return 1;
  multiply({rows, static_cast<const Weight*>(weight), static_cast<BFloat16*>(out), num_rows,
            num_inputs, num_outputs, static_cast<Finish>(finish)});
  return 0;
}
