// What is compiled for the host and for devices alike.
#pragma once

#ifdef __CUDACC__
#define CLOVER_HD __host__ __device__ __forceinline__
#else
#define CLOVER_HD inline
#endif
