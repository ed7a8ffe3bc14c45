// The products as a function of C. It is a part of cpu_kernels.cpp, and a library by itself, which takes
// a quarter of the time to compile: products alone differ where a CPU lacks instructions.

#include "products.h"

// Takes bfloat16 alone. `weight` is a Weight of weights.h; `finish`: 0 writes, 1 adds to `out`, 2 is
// silu(gate) * up.
extern "C" int millrace_multiply(const void* rows, const void* weight, void* out, int64_t num_rows,
                                 int64_t num_inputs, int64_t num_outputs, int finish) {
  if (finish < 0 || finish > 2) return 1;
  multiply({rows, static_cast<const Weight*>(weight), static_cast<BFloat16*>(out), num_rows,
            num_inputs, num_outputs, static_cast<Finish>(finish)});
  return 0;
}
