// Shared by check.cpp and traffic.cpp.
#pragma once
#include "runtime.h"

namespace cudabench {

// Where an access stands in the source: a code offset in this library, or the offset of a "file:line" text in it.
typedef uint32_t Place;
constexpr Place place_is_text = 1u << 31;
Place place_of_pc(const void *pc);
Place place_of_text(const char *text);
std::string place_text(Place place);

void access(const void *pointer, int bytes, bool write, Place place, bool atomic);
void aligned(const void *pointer, int bytes, Place place);

enum class Space : uint8_t { global, shared };
void count_launch();
void count_access(Space space, uint64_t address, int bytes, bool write, Place place);
void count_pause(bool paused); // accesses that are no instruction of the kernel
void count_async(int bytes);   // bytes of cp.async under way, more or less
void count_block();

} // namespace cudabench
