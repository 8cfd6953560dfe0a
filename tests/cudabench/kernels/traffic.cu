// Loads and stores whose sectors and bank conflicts are known. One warp; see tests/kernels/cuda/test_bench_traffic.py.
#include "planted.cuh"

extern "C" __global__ void global_loads(const float *__restrict__ x, float *y) {
    const int i = threadIdx.x;
    float sum = x[i];                                          // 4 sectors
    sum += x[64 + 2 * i];                                      // 8: every other element
    sum += x[256 + 8 * i];                                     // 32: a sector for each lane
    sum += x[1];                                               // 1: all lanes the same
    const float4 four = *reinterpret_cast<const float4 *>(x + 4 * i); // 16 sectors of one request
    if (i & 1) sum += x[512 + i];                              // 4 sectors for 64 bytes
    for (int k = 0; k < 3; k++) sum += x[32 * k + i];          // 3 requests of 4
    y[i] = sum + four.x + four.w;                              // 4
}

extern "C" __global__ void shared_loads(float *y) {
    __shared__ __align__(16) float rows[32][32], padded[32][33], wide[32][20];
    const int i = threadIdx.x;
    for (int k = 0; k < 32; k++) {
        rows[k][i] = i;   // no conflict
        padded[k][i] = i;
        if (i < 20) wide[k][i] = i;
    }
    __syncwarp();
    float sum = rows[i][3];                                    // 32 passes: one bank
    sum += padded[i][3];                                       // 1
    sum += rows[0][3];                                         // 1: a broadcast
    sum += rows[i / 2][i % 2];                                 // 16 rows in banks 0 and 1
    const float4 a = *reinterpret_cast<const float4 *>(&rows[i][0]); // 8 lanes in one group of banks, four times
    const float4 b = *reinterpret_cast<const float4 *>(&wide[i][0]); // rows of 80 bytes: no conflict
    y[i] = sum + a.x + a.y + b.x + b.w;
}

// ldmatrix of rows of 128 bytes, and of 144.
extern "C" __global__ void matrix_loads(unsigned *y) {
    __shared__ __align__(16) unsigned char tight[32][128], padded[32][144];
    for (int k = 0; k < 32; k++)
        for (int i = threadIdx.x; i < 128; i += 32) tight[k][i] = padded[k][i] = i;
    __syncwarp();
    unsigned r[4], s[4];
    load_a(r, &tight[threadIdx.x][0]);
    load_a(s, &padded[threadIdx.x][0]);
    y[threadIdx.x] = r[0] + r[3] + s[0] + s[3];
}
