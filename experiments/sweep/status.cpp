// SPDX-License-Identifier: Apache-2.0
#include <faultline/sweep/status.hpp>

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <faultline/sweep/merge.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::sweep {

std::size_t Status::count(State state) const {
    return static_cast<std::size_t>(
        std::ranges::count_if(states, [&](const CellState& s) { return s.state == state; }));
}

bool Status::all_done() const {
    return std::ranges::all_of(states, [](const CellState& s) { return is_done(s.state); });
}

bool Status::any_unreadable() const { return std::ranges::find(unreadable, true) != unreadable.end(); }

Status status_of(const std::string& folder, const std::vector<Cell>& cells) {
    Status status{cells, {}, {}};
    for (const Cell& cell : cells) {
        CellState state = state_of(folder, cell);
        const Outcome outcome = outcome_of(folder, cell, state);
        if (!outcome.trouble.empty()) state = {State::failed, state.steps, outcome.trouble};
        status.states.push_back(std::move(state));
        status.unreadable.push_back(!outcome.trouble.empty());
    }
    return status;
}

std::string summary(const Status& status) {
    const std::size_t not_finite = status.count(State::not_finite);
    std::string out = fmt::format("{} of {} run{} done", status.count(State::done) + not_finite, status.cells.size(),
                                  status.cells.size() == 1 ? " is" : "s are");
    if (not_finite > 0) out += fmt::format(" ({} ended at a value that is not finite)", not_finite);
    for (const State state : {State::at_work, State::stopped, State::failed, State::to_do})
        if (status.count(state) > 0) out += fmt::format(", {} {}", status.count(state), name(state));
    return out;
}

std::string sentence(std::string_view text) {
    std::string out;
    while (!text.empty()) {
        const std::size_t end = std::min(text.find_first_of("\"\\"), text.size());
        out += escaped(text.substr(0, end), end);
        if (end < text.size()) out += text[end];
        text.remove_prefix(std::min(end + 1, text.size()));
    }
    return out;
}

std::string table(const Status& status, bool every) {
    std::string out = summary(status) + "\n";
    std::size_t widest = 0;
    const auto shown = [&](const CellState& s) { return every || (s.state != State::done && s.state != State::to_do); };
    for (std::size_t i = 0; i < status.cells.size(); ++i)
        if (shown(status.states[i])) widest = std::max(widest, status.cells[i].name.size());
    for (std::size_t i = 0; i < status.cells.size(); ++i) {
        const CellState& s = status.states[i];
        if (!shown(s)) continue;
        std::string line = fmt::format("  {:<10}  {:<{}}  {} of {}", name(s.state), status.cells[i].name, widest,
                                       s.steps, status.cells[i].steps);
        if (!s.what.empty() && s.state != State::done) line += "  " + sentence(s.what);
        out += line + "\n";
    }
    return out;
}

std::string to_json(const Status& status) {
    using nlohmann::ordered_json;
    ordered_json runs = ordered_json::array();
    for (std::size_t i = 0; i < status.cells.size(); ++i) {
        const Cell& cell = status.cells[i];
        const CellState& s = status.states[i];
        ordered_json run{{"name", cell.name},     {"recipe", cell.recipe},
                         {"source", cell.source}, {"intervention", cell.intervention},
                         {"seed", cell.seed},     {"state", std::string(name(s.state))},
                         {"steps", s.steps},      {"of", cell.steps}};
        if (!s.what.empty() && s.state != State::done) run["what"] = s.what;
        runs.push_back(std::move(run));
    }
    ordered_json counts = ordered_json::object();
    for (const State state :
         {State::done, State::not_finite, State::at_work, State::stopped, State::failed, State::to_do})
        counts[std::string(name(state))] = status.count(state);
    const ordered_json object{{"schema", "faultline.sweep-status/1"},
                              {"complete", status.all_done()},
                              {"counts", std::move(counts)},
                              {"runs", std::move(runs)}};
    return object.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace faultline::sweep
