// Built together with csrc/cuda/*.cu; see cuda_runtime.h.
#include "cuda_runtime.h"

extern "C" void sagc_host_order(int is_reversed) { sagc_host::is_reversed = is_reversed != 0; }
