// Counts what the memory system would do: 32-byte sectors per global request, bank conflicts per shared one.
//
// A request is what one warp does in one execution of one load or store. Lanes run one after another here, so accesses
// are put together by (place in the code, number of meetings of the lanes so far, how often since): lanes that loop a
// different number of times between two meetings may be put together differently than a GPU would.
#include "check.h"
#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

namespace cudabench {
namespace {

struct Key {
    Place place;
    uint32_t warp, meeting, turn;
    uint8_t kind; // 0 global read, 1 global write, 2 shared read, 3 shared write
    bool operator<(const Key &o) const {
        return std::tie(kind, place, warp, meeting, turn) < std::tie(o.kind, o.place, o.warp, o.meeting, o.turn);
    }
};
struct Lane {
    uint64_t address;
    int bytes, lane;
};
struct Row { // what Python reads: cudabench_traffic
    uint32_t place, kind;
    uint64_t requests, lanes, bytes, moved, ideal; // moved: sectors, or passes over the banks
};

std::map<Key, std::vector<Lane>> requests;
std::map<std::pair<uint8_t, Place>, Row> rows;
std::vector<Row> result;
struct Turns {
    uint32_t meeting = 0;
    std::unordered_map<uint64_t, uint32_t> count;
};
std::vector<Turns> turns;
std::vector<int64_t> async_now, async_most; // bytes of cp.async under way, by thread: at present, and the most so far
int64_t async_peak;
bool paused;

void finish(const Key &key, const std::vector<Lane> &lanes) {
    Row &row = rows[{key.kind, key.place}];
    row.place = key.place, row.kind = key.kind;
    row.requests++, row.lanes += lanes.size();
    if (key.kind < 2) {
        std::unordered_set<uint64_t> sectors, bytes;
        for (const Lane &l : lanes)
            for (int i = 0; i < l.bytes; i++) bytes.insert(l.address + i), sectors.insert((l.address + i) / 32);
        row.bytes += bytes.size(), row.moved += sectors.size(), row.ideal += (bytes.size() + 31) / 32;
        return;
    }
    // 32 banks of 4 bytes. Lanes of a warp are served in one pass up to 4 bytes each, in two at 8, in four at 16;
    // in a pass, one word of each bank, which any number of lanes may read.
    const int widest = std::max_element(lanes.begin(), lanes.end(), [](const Lane &a, const Lane &b) {
                           return a.bytes < b.bytes;
                       })->bytes;
    const int together = widest <= 4 ? 32 : widest <= 8 ? 16 : 8;
    for (int first = 0; first < 32; first += together) {
        std::unordered_set<uint64_t> words;
        int in_bank[32] = {}, most = 0;
        for (const Lane &l : lanes) {
            if (l.lane < first || l.lane >= first + together) continue;
            for (uint64_t word = l.address / 4; word <= (l.address + l.bytes - 1) / 4; word++)
                if (words.insert(word).second) most = std::max(most, ++in_bank[word % 32]);
        }
        row.bytes += words.size() * 4, row.moved += most, row.ideal += (words.size() + 31) / 32;
    }
}

} // namespace

void count_launch() { rows.clear(), requests.clear(), result.clear(), async_peak = 0, paused = false; }

void count_access(Space space, uint64_t address, int bytes, bool write, Place place) {
    if (!state.launch->traffic || paused) return;
    const Fiber *f = fiber();
    if ((int)turns.size() < state.threads) turns.resize(state.threads);
    Turns &t = turns[f->id];
    if (t.meeting != f->rendezvous) t.meeting = f->rendezvous, t.count.clear();
    const uint8_t kind = (space == Space::shared ? 2 : 0) + write;
    const uint32_t turn = t.count[(uint64_t)kind << 32 | place]++;
    requests[{place, (uint32_t)f->id / 32, f->rendezvous, turn, kind}].push_back({address, bytes, f->id & 31});
}
void count_pause(bool now) { paused = now; }
void count_async(int bytes) {
    const size_t id = fiber()->id;
    if (async_now.size() <= id) async_now.resize(id + 1), async_most.resize(id + 1);
    async_most[id] = std::max(async_most[id], async_now[id] += bytes);
}
void count_block() {
    for (const auto &request : requests) finish(request.first, request.second);
    requests.clear();
    for (Turns &t : turns) t.meeting = 0, t.count.clear();
    // Threads run one after another here. On a GPU they run side by side, so that all have their most at once.
    int64_t sum = 0;
    for (int64_t most : async_most) sum += most;
    async_peak = std::max(async_peak, sum);
    async_now.clear(), async_most.clear();
}

} // namespace cudabench

using namespace cudabench;
extern "C" __attribute__((visibility("default"))) size_t cudabench_traffic(const Row **out, int64_t *async) {
    result.clear();
    for (const auto &row : rows) result.push_back(row.second);
    *out = result.data(), *async = async_peak;
    return result.size();
}
