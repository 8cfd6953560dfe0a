// out = x . weight^T + bias, weights widened on the way from their stored format: a matrix-vector product that takes a
// few rows of x at once.
//
// Grid: (rows of the weight / 16, ceil(T / TOKENS)), 128 threads: a warp computes 4 outputs of up to TOKENS rows of x,
// its lanes units of the weight's row. Every output is summed in one order, whatever T: a lane over its units ascending,
// then the butterfly of warp_sum. So decode and prefill give the same bits.
//
// Bytes: the weight once for each TOKENS rows of x, in its stored size; x, out beside it small. Operations:
// 2 * rows * cols for each row of x. Roof: memory bandwidth up to TOKENS rows; float32 multiply-adds beyond. A product
// of many rows on tensor cores is another kernel's business (dequantise makes its tiles) and another order of sums.
#include "weights.cuh"

#ifndef TOKENS
#define TOKENS 8
#endif
#define WARPS 4
#define OUTPUTS 4 // of a warp
#define STRIDE (UNIT == 4 ? 4 : UNIT + 4) // floats of a unit in shared memory: an odd number of 16-byte chunks

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3)
matmul(const float *__restrict__ x, const unsigned char *__restrict__ quants, const unsigned char *__restrict__ high,
       const unsigned char *__restrict__ scales, const unsigned char *__restrict__ deltas,
       const float *__restrict__ bias, float *__restrict__ out, long long out_stride, int count, int rows, int cols) {
    __shared__ __align__(16) float tile[TOKENS][32 * STRIDE];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int row0 = (blockIdx.x * WARPS + warp) * OUTPUTS, token0 = blockIdx.y * TOKENS;
    const int tokens = min(TOKENS, count - token0), units = (cols + UNIT - 1) / UNIT;
    const int padded_units = (cols + 31) / 32 * (32 / UNIT);
    const Weights weights = {quants, high, scales, deltas, padded_units};
    float sums[OUTPUTS][TOKENS];
#pragma unroll
    for (int r = 0; r < OUTPUTS; r++)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) sums[r][t] = 0.f;

    for (int unit0 = 0; unit0 < units; unit0 += 32) {
        __syncthreads();
        for (int i = threadIdx.x; i < tokens * 32 * UNIT; i += 32 * WARPS) {
            const int t = i / (32 * UNIT), k = i % (32 * UNIT), col = unit0 * UNIT + k;
            tile[t][k / UNIT * STRIDE + k % UNIT] = col < cols ? x[(long long)(token0 + t) * cols + col] : 0.f;
        }
        __syncthreads();
        if (unit0 + lane >= units) continue; // still comes to the barriers
#pragma unroll
        for (int r = 0; r < OUTPUTS; r++) {
            if (row0 + r >= rows) break;
            float w[UNIT];
            load_unit(weights, row0 + r, unit0 + lane, w);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                if (t >= tokens) break;
                const float *values = tile[t] + lane * STRIDE;
#pragma unroll
                for (int i = 0; i < UNIT; i += 4) {
                    const float4 v = *reinterpret_cast<const float4 *>(values + i);
                    sums[r][t] = fmaf(w[i], v.x, sums[r][t]);
                    sums[r][t] = fmaf(w[i + 1], v.y, sums[r][t]);
                    sums[r][t] = fmaf(w[i + 2], v.z, sums[r][t]);
                    sums[r][t] = fmaf(w[i + 3], v.w, sums[r][t]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < OUTPUTS; r++) {
        if (row0 + r >= rows) break;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (t >= tokens) break;
            const float sum = warp_sum(sums[r][t]);
            if (lane == 0) out[(token0 + t) * out_stride + row0 + r] = bias ? sum + bias[row0 + r] : sum;
        }
    }
}
