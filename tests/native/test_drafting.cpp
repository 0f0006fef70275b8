// native/speculative: when a sequence pauses its drafts, and what a profile of steps counts.
#include "check.h"

#include "speculative/draft_pause.h"
#include "speculative/drafting.h"
#include "speculative/step_profile.h"

using spark::draft_pause;
using spark::drafting;
using spark::step_profile;

namespace {

void pauses_when_few_drafts_are_accepted() {
    draft_pause pause;
    for (int i = 0; i < draft_pause::WINDOW - 1; i++) {
        CHECK(pause.may_draft());
        CHECK(!pause.verified(i < 2 ? 1 : 0)); // 2 of 24 are fewer than 10 %
    }
    CHECK(pause.verified(0));
    CHECK(pause.is_paused());
}

void goes_on_at_three_of_the_last_24() {
    draft_pause pause;
    for (int i = 0; i < 1000; i++) {
        CHECK(pause.may_draft());
        CHECK(!pause.verified(i % 8 == 0 ? 5 : 0)); // 3 of any 24
    }
}

void looks_at_the_last_drafts_only() {
    draft_pause pause;
    for (int i = 0; i < 1000; i++) {
        CHECK(!pause.verified(4));
    }
    int n = 1;
    while (!pause.verified(0)) {
        n++;
    }
    CHECK_EQ(n, draft_pause::WINDOW - 2); // until two good ones are left in the window
}

void begins_anew_after_its_rest() {
    draft_pause pause;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < draft_pause::WINDOW; i++) {
            CHECK(pause.may_draft());
            CHECK_EQ(pause.verified(0), i == draft_pause::WINDOW - 1);
        }
        for (int i = 0; i < draft_pause::TOKENS_OF_REST; i++) {
            CHECK(!pause.may_draft());
        }
    }
    CHECK(pause.may_draft());
    CHECK(!pause.is_paused());
}

void sequences_pause_alone() {
    drafting d;
    CHECK_EQ(d.n_draft(0, 4), 0); // no width yet
    d.set_width(3, 7, {});
    for (int i = 0; i < draft_pause::WINDOW; i++) {
        d.drafted(3, nullptr, 4);
        d.verified(3, 0);
        d.drafted(0, nullptr, 4);
        d.verified(0, 1);
    }
    CHECK_EQ(d.n_draft(3, 4), 0);
    CHECK_EQ(d.n_draft(0, 4), 3);
    CHECK_EQ(d.n_draft(0, 2), 2);
    CHECK_EQ(d.get().n_pauses, (uint64_t) 1);
    CHECK_EQ(d.get().n_paused, 1);
    d.reset();
    d.set_width(3, 7, {});
    CHECK_EQ(d.n_draft(3, 4), 3);
    CHECK_EQ(d.get().n_pauses, (uint64_t) 0);
}

uint64_t total(const step_profile & p, server_phase phase) { return p.get().us[(int) phase]; }

// One step with a draft of 3, of which 2 are accepted, from `us` on: 10 draft, 5 other, 20 verify, 3 features, 2 other, 4 sampling.
uint64_t step(step_profile & p, uint64_t us) {
    p.phase_end(server_phase::draft, us += 10);
    p.phase_end(server_phase::other, us += 5);
    p.phase_end(server_phase::verify, us += 20);
    p.phase_end(server_phase::features, us += 3);
    p.phase_end(server_phase::other, us += 2);
    p.phase_end(server_phase::sampling, us += 4);
    p.verified(3, 2);
    return us;
}

void profile_adds_up_steps_with_a_draft() {
    step_profile p;
    p.phase_end(server_phase::other, 1000);
    uint64_t us = step(p, 1000);
    p.phase_end(server_phase::other, us += 6); // sending tokens: of the first step, which ends when the second drafts
    us = step(p, us);
    p.rest();
    CHECK_EQ(p.get().n_steps, (uint64_t) 2);
    CHECK_EQ(total(p, server_phase::draft), (uint64_t) 20);
    CHECK_EQ(total(p, server_phase::verify), (uint64_t) 40);
    CHECK_EQ(total(p, server_phase::features), (uint64_t) 6);
    CHECK_EQ(total(p, server_phase::sampling), (uint64_t) 8);
    CHECK_EQ(total(p, server_phase::other), (uint64_t) 20);
    CHECK_EQ(p.get().n_drafted, (uint64_t) 6);
    CHECK_EQ(p.get().n_accepted, (uint64_t) 4);
    CHECK_EQ(p.get().accepted_at[1], (uint64_t) 2);
    CHECK_EQ(p.get().accepted_at[2], (uint64_t) 0);
    CHECK_EQ(p.get().drafted_at[2], (uint64_t) 2);
}

void profile_leaves_out_prompts_rests_and_steps_without_a_draft() {
    step_profile p;
    p.phase_end(server_phase::other, 100);
    p.phase_end(server_phase::verify, 900000); // a prompt
    p.phase_end(server_phase::features, 910000);
    p.phase_end(server_phase::other, 910010);
    uint64_t us = step(p, 910010);
    p.phase_end(server_phase::other, us += 7);
    p.phase_end(server_phase::verify, us += 5000); // one token without a draft
    p.phase_end(server_phase::features, us += 100);
    p.phase_end(server_phase::other, us += 1);
    us = step(p, us);
    p.rest();
    p.phase_end(server_phase::other, us += 100000000); // nobody asked anything for a while
    us = step(p, us);
    p.rest();
    CHECK_EQ(p.get().n_steps, (uint64_t) 3);
    CHECK_EQ(total(p, server_phase::verify), (uint64_t) 60);
    CHECK_EQ(total(p, server_phase::features), (uint64_t) 9);
    CHECK_EQ(total(p, server_phase::other), (uint64_t) 28);
}

void profile_reports_steps_without_a_draft() {
    step_profile p;
    uint64_t us = 100;
    p.phase_end(server_phase::other, us);
    p.single();
    CHECK(!p.phase_end(server_phase::verify, us += 50));
    p.phase_end(server_phase::features, us += 5);
    p.single();
    p.phase_end(server_phase::other, us += 3); // of the first: the second has not computed anything
    const auto first = p.phase_end(server_phase::verify, us += 60);
    CHECK(first && first->n_singles == 1 && first->n_drafts == 0);
    CHECK_EQ(first->us[(int) server_phase::verify], (uint64_t) 50);
    CHECK_EQ(first->us[(int) server_phase::other], (uint64_t) 3);
    const auto second = p.phase_end(server_phase::draft, us += 2);
    CHECK(second && second->n_singles == 1);
    CHECK_EQ(p.get().n_steps, (uint64_t) 0);
}

void a_run_is_described_when_there_was_one() {
    drafting d;
    CHECK(spark::describe(d.get()).empty());
    d.phase_end(server_phase::draft);
    d.drafted(0, nullptr, 4);
    d.phase_end(server_phase::verify);
    d.verified(0, 3);
    d.request_finished();
    CHECK(spark::describe(d.get()).find("4.00 tokens a step over 1 steps") != std::string::npos);
}

} // namespace

int main() {
    RUN(pauses_when_few_drafts_are_accepted);
    RUN(goes_on_at_three_of_the_last_24);
    RUN(looks_at_the_last_drafts_only);
    RUN(begins_anew_after_its_rest);
    RUN(sequences_pause_alone);
    RUN(profile_adds_up_steps_with_a_draft);
    RUN(profile_leaves_out_prompts_rests_and_steps_without_a_draft);
    RUN(profile_reports_steps_without_a_draft);
    RUN(a_run_is_described_when_there_was_one);
    return test::failures();
}
