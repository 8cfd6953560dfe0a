// RMS norm and layer norm of rows, with the residual stream added first when asked, and RMS norm of heads in place.
//
// rms_norm, layer_norm: grid (rows), 256 threads; a row is read from global memory once or (layer_norm) twice more from
// the cache. head_norm: grid (rows of heads), one warp a head. Bytes: 8 a value, 16 with a residual. Roof: memory
// bandwidth. A row's sum: strided by 256 threads, then block_sum; the same order for any number of rows.
#include "common.cuh"

#define THREADS 256

// x / sqrt(mean(x^2) + eps) * weight by row (Zhang & Sennrich 2019, eq. 4). With `residual`: first residual += x, then
// the norm of that. out may be x.
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const float *x, const float *__restrict__ weight, float *out, float *residual, int cols, float eps) {
    __shared__ float scratch[32];
    const long long row = (long long)blockIdx.x * cols;
    float squares = 0.f;
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        float value = x[row + i];
        if (residual) residual[row + i] = value = residual[row + i] + value;
        squares = fmaf(value, value, squares);
    }
    const float root = sqrtf(block_sum(squares, scratch) / (float)cols + eps);
    const float *source = residual ? residual : x; // every thread reads what it wrote itself
    for (int i = threadIdx.x; i < cols; i += THREADS) out[row + i] = source[row + i] / root * weight[i];
}

// (x - mean) / sqrt(variance + eps) * weight + bias by row (Ba et al. 2016); the variance is that of the population,
// taken around the mean in a second pass. bias may be absent; residual and out as for rms_norm.
extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm(const float *x, const float *__restrict__ weight, const float *__restrict__ bias, float *out,
           float *residual, int cols, float eps) {
    __shared__ float scratch[32];
    const long long row = (long long)blockIdx.x * cols;
    float total = 0.f;
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        float value = x[row + i];
        if (residual) residual[row + i] = value = residual[row + i] + value;
        total += value;
    }
    const float mean = block_sum(total, scratch) / (float)cols;
    const float *source = residual ? residual : x;
    float squares = 0.f;
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        const float away = source[row + i] - mean;
        squares = fmaf(away, away, squares);
    }
    const float root = sqrtf(block_sum(squares, scratch) / (float)cols + eps);
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        const float value = (source[row + i] - mean) / root * weight[i];
        out[row + i] = bias ? value + bias[i] : value;
    }
}

// rms_norm of each head in place. x: rows of `heads` heads of `dim`, row_stride apart; grid (rows * heads / 8).
extern "C" __global__ void __launch_bounds__(THREADS)
head_norm(float *x, const float *__restrict__ weight, long long row_stride, int count, int heads, int dim, float eps) {
    const int head = blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (head >= count) return;
    float *values = x + head / heads * row_stride + (long long)(head % heads) * dim;
    float squares = 0.f;
    for (int i = lane; i < dim; i += 32) squares = fmaf(values[i], values[i], squares);
    const float root = sqrtf(warp_sum(squares) / (float)dim + eps);
    for (int i = lane; i < dim; i += 32) values[i] = values[i] / root * weight[i];
}
