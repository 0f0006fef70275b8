// Which expert should be in a fast slot: use counts with exponential decay. Pure bookkeeping of one layer: no I/O, no
// time, no threads, no locks; the caller serialises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace spark {

class residency_policy {
public:
    // half_life: tokens after which a past use counts half. The default is measured: docs/decisions/0042.
    explicit residency_policy(int32_t n_expert, double half_life = 48.0);

    // Uses that count as if they had just happened, [n_expert], instead of what was recorded; empty: changes nothing.
    void seed(const std::vector<double> & uses);
    // n_tokens pass; uses recorded after it weigh more than those before.
    void advance(int64_t n_tokens);
    // `expert` was selected so often, now; earlier uses weigh less than one each (mean_weight).
    void record(int32_t expert, double uses);
    // What one use counts on average that lies anywhere within the last n_tokens; 1 for the last one.
    double mean_weight(int64_t n_tokens) const;
    // Hotter is greater; comparable between experts of this layer at any one time.
    double score(int32_t expert) const { return scores[expert]; }
    // The score of one use now: score / unit compares experts of different layers.
    double unit() const { return weight; }

    // The `n` candidates that should leave first, coldest first; ties: least recently used. Reorders `candidates` and
    // shortens it to at most n.
    void select_victims(std::vector<int32_t> & candidates, size_t n) const;

    // True when `expert` is worth the copy into the slot of `resident`: hotter by a margin, so that two experts of
    // equal heat do not take turns.
    bool should_replace(int32_t expert, int32_t resident) const;

private:
    void renormalise();

    double  growth;     // weight of a use grows by this factor per token, instead of decaying every score
    double  weight = 1; // of a use now
    int64_t tick   = 0;
    std::vector<double>  scores;    // [n_expert]
    std::vector<int64_t> last_used; // [n_expert]
};

} // namespace spark
