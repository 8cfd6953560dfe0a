// Rows of a weight in a wider type: the embeddings of tokens, and tiles for a matrix product that wants plain ones.
//
// Grid: (rows, units of a row / 128), 128 threads, a unit each. Bytes: the row in its stored size, and itemsize a value
// written. Roof: memory bandwidth.
#include "weights.cuh"

// out[t] = table[ids[t]] * scale. An id outside of the table makes NaN: there is no such row.
extern "C" __global__ void __launch_bounds__(128)
embed(const int *__restrict__ ids, const unsigned char *__restrict__ quants, const unsigned char *__restrict__ high,
      const unsigned char *__restrict__ scales, const unsigned char *__restrict__ deltas, float *__restrict__ out,
      int rows, int cols, float scale) {
    const Weights weights = {quants, high, scales, deltas, (cols + 31) / 32 * (32 / UNIT)};
    const int unit = blockIdx.y * blockDim.x + threadIdx.x, id = ids[blockIdx.x];
    if (unit * UNIT >= cols) return;
    const bool known = id >= 0 && id < rows;
    float w[UNIT];
    load_unit(weights, known ? id : 0, unit, w);
    float *target = out + (long long)blockIdx.x * cols;
#pragma unroll
    for (int i = 0; i < UNIT; i++)
        if (unit * UNIT + i < cols) target[unit * UNIT + i] = known ? w[i] * scale : __int_as_float(0x7fc00000);
}

// out[r] = weight[first_row + r], narrowed to the storage type (-DSTORAGE).
extern "C" __global__ void __launch_bounds__(128)
dequantise(const unsigned char *__restrict__ quants, const unsigned char *__restrict__ high,
           const unsigned char *__restrict__ scales, const unsigned char *__restrict__ deltas,
           stored_t *__restrict__ out, int first_row, int cols) {
    const Weights weights = {quants, high, scales, deltas, (cols + 31) / 32 * (32 / UNIT)};
    const int unit = blockIdx.y * blockDim.x + threadIdx.x;
    if (unit * UNIT >= cols) return;
    float w[UNIT];
    load_unit(weights, first_row + blockIdx.x, unit, w);
    stored_t *target = out + (long long)blockIdx.x * cols;
#pragma unroll
    for (int i = 0; i < UNIT; i++)
        if (unit * UNIT + i < cols) narrow(w[i], target + unit * UNIT + i);
}
