// Merges the parts of a row's context in order, and clears rows that see nothing.
//
// Grid: workers, 128 threads; workers walk the list of tokens whose number of parts is not one. Bytes: head_dim + 2
// floats for each part and head. Roof: memory bandwidth; small beside the attention before it.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(128, 8)
merge_parts(const int *__restrict__ merges, const int *__restrict__ num_merges, const int *__restrict__ state_starts,
            const int *__restrict__ state_counts, const float *__restrict__ state_values,
            const float *__restrict__ state_scalars, float *__restrict__ out, long long out_stride,
            const float *__restrict__ sinks, int heads) {
    for (int index = blockIdx.x; index < *num_merges; index += gridDim.x) {
        const int token = merges[index], first = state_starts[token], count = state_counts[token];
        for (int i = threadIdx.x; i < heads * HEAD_DIM; i += blockDim.x) {
            const int head = i / HEAD_DIM, dim = i % HEAD_DIM;
            float maximum = NEG_INF, sum = 0.f, weighted = 0.f;
            for (int s = 0; s < count; s++)
                maximum = fmaxf(maximum, state_scalars[2 * state_index(first + s, heads, head)]);
            for (int s = 0; s < count; s++) {
                const long long state = state_index(first + s, heads, head);
                const float kept = decay(state_scalars[2 * state], maximum);
                sum = fmaf(state_scalars[2 * state + 1], kept, sum);
                weighted = fmaf(state_values[state * HEAD_DIM + dim], kept, weighted);
            }
            out[token * out_stride + i] = count ? finished(maximum, sum, weighted, sinks, head) : 0.f;
        }
    }
}
