// Counters of one layer since loading; all units are written in spark_moe.h. The layer's lock protects them.
#pragma once

#include "spark_moe.h"

#include <cstdint>
#include <vector>

namespace spark {

struct routing_stats {
    explicit routing_stats(int32_t n_expert = 0) : uses(n_expert, 0) {}

    std::vector<uint64_t> uses; // [n_expert]
    uint64_t n_uses      = 0;
    uint64_t hits        = 0;
    uint64_t misses      = 0;
    uint64_t misses_home = 0;
    uint64_t bytes_read  = 0;
    uint64_t bytes_home  = 0;
    uint64_t bytes_ahead = 0;
    uint64_t reads_home  = 0;
    uint64_t reads_ahead = 0;
    uint64_t promotions  = 0;
    uint64_t evictions   = 0;
    uint64_t read_ns     = 0;

    void reset() { *this = routing_stats((int32_t) uses.size()); }

    // Adds the counters (not the per-expert uses) to `out`.
    void add_to(spark_stats & out) const {
        out.uses        += n_uses;
        out.hits        += hits;
        out.misses      += misses;
        out.misses_home += misses_home;
        out.bytes_read  += bytes_read;
        out.bytes_home  += bytes_home;
        out.bytes_ahead += bytes_ahead;
        out.reads_home  += reads_home;
        out.reads_ahead += reads_ahead;
        out.promotions  += promotions;
        out.evictions   += evictions;
        out.read_ns     += read_ns;
    }
};

} // namespace spark
