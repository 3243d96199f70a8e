#include "portable.h"

#if defined(__x86_64__)
const Kernels avx2_kernels = KERNELS("avx2", Portable);
#endif
