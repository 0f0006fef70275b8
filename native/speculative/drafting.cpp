#include "drafting.h"

#include "../status.h"

#include "ggml.h"
#include "llama.h"

#include <cmath>

namespace spark {

namespace {

// The first row that the draft computed last has a logit that is not a number. False when the logits stayed on a device.
bool has_nan(llama_context * context) {
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(context));
    const float * logits = llama_get_sampled_logits_ith(context, 0);
    int32_t n = logits ? (int32_t) llama_get_sampled_logits_count_ith(context, 0) : 0;
    if (!logits) {
        logits = llama_get_logits(context);
        n      = llama_vocab_n_tokens(vocab);
    }
    for (int32_t i = 0; logits && i < n; i++) {
        if (std::isnan(logits[i])) {
            return true;
        }
    }
    return false;
}

} // namespace

drafting::sequence & drafting::at(int id_slot) {
    if ((size_t) id_slot >= sequences.size()) {
        sequences.resize(id_slot + 1);
    }
    return sequences[id_slot];
}

int32_t drafting::n_draft(int id_slot, int32_t n_allowed) {
    const std::lock_guard<std::mutex> lock(mutex);
    const int32_t n = !is_broken && at(id_slot).pause.may_draft() ? width.choose(id_slot, n_allowed) : 0;
    if (n == 0) {
        profile.single();
    }
    return n;
}

void drafting::drafted(int id_slot, llama_context * context, size_t n_tokens) {
    const std::lock_guard<std::mutex> lock(mutex);
    sequence & s = at(id_slot);
    s.n_drafted = (int32_t) n_tokens;
    if (context && n_tokens > 0 && s.was_useless && !is_broken && has_nan(context)) {
        is_broken = true;
        log(log_level::warn, "draft: the draft model computes logits that are not numbers (an overflow, or a damaged file); drafting is off until the model is loaded again");
    }
}

void drafting::verified(int id_slot, size_t n_accepted) {
    const std::lock_guard<std::mutex> lock(mutex);
    sequence & s = at(id_slot);
    s.was_useless = n_accepted == 0;
    profile.verified(s.n_drafted, (int32_t) n_accepted);
    width.verified(id_slot, s.n_drafted, (int32_t) n_accepted);
    if (s.pause.verified((int32_t) n_accepted)) {
        n_pauses++;
        log(log_level::warn, "draft: fewer than %d %% of the last %d drafts of slot %d were accepted; it goes on without for %d tokens", draft_pause::MIN_PERCENT, draft_pause::WINDOW, id_slot,
            draft_pause::TOKENS_OF_REST);
    }
}

void drafting::phase_end(server_phase phase) {
    const std::lock_guard<std::mutex> lock(mutex);
    step_ended(profile.phase_end(phase, (uint64_t) ggml_time_us()));
}

void drafting::computed(int32_t n_reused_so_far) {
    const std::lock_guard<std::mutex> lock(mutex);
    n_graphs++;
    n_reused = n_reused_so_far;
}

void drafting::request_finished() {
    const std::lock_guard<std::mutex> lock(mutex);
    step_ended(profile.rest());
}

void drafting::step_ended(const std::optional<step_profile::step> & step) {
    if (step) {
        uint64_t us = 0;
        for (const uint64_t part : step->us) {
            us += part;
        }
        width.step(step->n_drafts, step->n_drafted, step->n_accepted, step->n_singles, us/1000.0, step->us[(int) server_phase::draft]/1000.0);
    }
}

void drafting::set_width(int32_t n_fixed, int32_t n_most, std::vector<step_cost::point> curve) {
    const std::lock_guard<std::mutex> lock(mutex);
    width.configure(n_fixed, n_most, std::move(curve));
}

void drafting::reset() {
    const std::lock_guard<std::mutex> lock(mutex);
    sequences.clear();
    profile   = {};
    width     = {};
    n_pauses  = 0;
    n_graphs  = 0;
    n_reused  = 0;
    is_broken = false;
}

drafting::report drafting::get() const {
    const std::lock_guard<std::mutex> lock(mutex);
    report r { profile.get(), n_pauses, 0, is_broken, n_graphs, (uint64_t) n_reused, width.is_auto(), width.chosen(), width.costs().points() };
    for (const sequence & s : sequences) {
        r.n_paused += s.pause.is_paused();
    }
    return r;
}

std::string describe(const drafting::report & report) {
    const step_profile::totals & t = report.steps;
    if (t.n_steps == 0) {
        return "";
    }
    const auto ms = [&](server_phase phase) { return t.us[(int) phase]/1000.0/t.n_steps; };
    std::string depths;
    for (size_t i = 0; i < t.drafted_at.size(); i++) {
        depths += format(" %.0f", 100.0*t.accepted_at[i]/t.drafted_at[i]);
    }
    std::string widths;
    for (size_t n = 0; report.has_auto_width && n < report.n_by_width.size(); n++) {
        widths += format("%s %llu", n == 0 ? "; drafts by verify width, from 0:" : "", (unsigned long long) report.n_by_width[n]);
    }
    return format("draft: %.2f tokens a step over %llu steps; ms a step: draft with its heads %.2f, verify %.2f, features %.2f, sampling %.2f, other %.2f; %% accepted by depth:%s; %llu pauses%s",
        1 + (double) t.n_accepted/t.n_drafts, (unsigned long long) t.n_steps, ms(server_phase::draft), ms(server_phase::verify), ms(server_phase::features), ms(server_phase::sampling),
        ms(server_phase::other), depths.c_str(), (unsigned long long) report.n_pauses, widths.c_str());
}

} // namespace spark
