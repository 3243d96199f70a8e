#include "portable.h"

const Kernels generic_kernels = KERNELS("generic", Portable);
