// How Python calls a kernel: CUDABENCH_EXPORT(name), which translate.py appends for every extern "C" __global__ function.
#pragma once
namespace cudabench {

struct Launch {
    unsigned grid[3], block[3];
    uint64_t shared_bytes;
    int order; // 0 forward, 1 reverse, 2 random
    int traffic;
    uint64_t seed;
    uint64_t max_switches; // 0: no limit
    char *error;
    uint64_t error_bytes;
};
typedef void (*Body)(void *kernel, void **arguments);
int run(const char *name, Body body, void *kernel, void **arguments, const Launch *launch);

template <size_t...> struct Indices {};
// The arguments lie in Python's memory, which a kernel may not read: not instrumented.
template <class... A, size_t... I>
__attribute__((no_sanitize("thread"))) void apply(void (*kernel)(A...), void **arguments, Indices<I...>) {
    kernel(*(A *)arguments[I]...);
}
template <class... A> void body_of(void *kernel, void **arguments) {
    apply((void (*)(A...))kernel, arguments, Indices<__integer_pack(sizeof...(A))...>());
}
template <class... A> int launch(const char *name, void (*kernel)(A...), void **arguments, const Launch *how) {
    return run(name, body_of<A...>, (void *)kernel, arguments, how);
}
// "... [with A = {const float*, int}]", and the sizes, for Python to read.
template <class... A> const char *signature(void (*)(A...), const int **sizes) {
    static const int all[] = {(int)sizeof(A)..., 0};
    *sizes = all;
    return __PRETTY_FUNCTION__;
}

} // namespace cudabench
#define CUDABENCH_EXPORT(k)                                                                                            \
    extern "C" __attribute__((visibility("default"))) int cudabench_launch_##k(void **a, const cudabench::Launch *l) { \
        return cudabench::launch(#k, k, a, l);                                                                         \
    }                                                                                                                  \
    extern "C" __attribute__((visibility("default"))) const char *cudabench_signature_##k(const int **sizes) {         \
        return cudabench::signature(k, sizes);                                                                         \
    }
