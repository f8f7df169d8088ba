// SPDX-License-Identifier: Apache-2.0
// FAULTLINE_HD marks what compiles for host and device, so that rounding, formats, random numbers and the tile schedule
// exist once for both.
#pragma once

#if defined(__CUDACC__)
#define FAULTLINE_HD __host__ __device__
#else
#define FAULTLINE_HD
#endif
