// Stores K and V of T tokens in their slots, rotating K on the way when asked.
//
// Grid: (tokens), 256 threads; a thread stores one element of K and one of V at a time. Bytes: 8 read and 2 * itemsize
// written for each element of K. Roof: memory bandwidth.
#include "common.cuh"

// slots: frame * block_size + offset in pool 0; negative: skipped (padding). Offsets are 64-bit: a pool may have more
// than 2^31 elements. With `angles` [P, rotary] (cos, then sin) pairs (i, i + rotary / 2) of K are rotated by the row
// `positions[token]` (Su et al. 2021, eq. 34) before they are stored; the key array itself stays as it is.
extern "C" __global__ void __launch_bounds__(256)
write_kv(const float *__restrict__ key, long long key_stride, const float *__restrict__ value, long long value_stride,
         stored_t *__restrict__ pool, const long long *__restrict__ slots, int num_kv_heads, int head_dim,
         int block_size, long long block_stride, long long layer_offset, long long kv_stride, long long head_stride,
         int k_transposed, const int *__restrict__ positions, const float *__restrict__ angles, int rotary) {
    const long long slot = slots[blockIdx.x];
    if (slot < 0) return;
    const long long frame = slot / block_size;
    const int offset = (int)(slot - frame * block_size), half = rotary / 2;
    const float *k = key + blockIdx.x * key_stride, *v = value + blockIdx.x * value_stride;
    const float *turn = angles ? angles + (long long)positions[blockIdx.x] * rotary : nullptr;
    stored_t *block = pool + frame * block_stride + layer_offset;
    for (int i = threadIdx.x; i < num_kv_heads * head_dim; i += blockDim.x) {
        const int head = i / head_dim, dim = i % head_dim;
        float x = k[i];
        if (turn && dim < 2 * half) {
            const bool first = dim < half;
            const float other = k[first ? i + half : i - half];
            const float cosine = turn[first ? dim : dim - half], sine = turn[first ? dim + half : dim];
            x = rotated(x, first ? -other : other, cosine, sine);
        }
        stored_t *target = block + head * head_stride;
        narrow(x, target + (k_transposed ? (long long)dim * block_size + offset : (long long)offset * head_dim + dim));
        narrow(v[i], target + kv_stride + (long long)offset * head_dim + dim);
    }
}
