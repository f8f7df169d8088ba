// SPDX-License-Identifier: Apache-2.0
#include <faultline/sweep/launch.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <fstream>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/sweep/cell_state.hpp>
#include <faultline/sweep/child.hpp>
#include <faultline/sweep/mps.hpp>

namespace faultline::sweep {
namespace {

using Clock = std::chrono::steady_clock;

struct Work {
    const Cell* cell;
    Child child;
    std::size_t device;
};

/// The last line of a log that says something.
std::string last_line(const std::string& path) {
    std::ifstream in(path);
    std::string last;
    for (std::string line; std::getline(in, line);)
        if (!line.empty()) last = line;
    return last;
}

class Launcher {
  public:
    Launcher(const std::string& folder, const std::vector<Cell>& cells, const Local& local)
        : folder_(folder), local_(local), per_device_(std::max<std::size_t>(local.devices.size(), 1)) {
        for (const Cell& cell : cells) {
            const CellState found = state_of(folder, cell);
            if (is_done(found.state)) continue;
            if (found.state == State::at_work) {
                ++out_.elsewhere;
                continue;
            }
            left_.push_back(&cell);
            before_.emplace_back(&cell, found.state == State::stopped ? found.steps : 0);
        }
        if (local.mps && !left_.empty()) service_.emplace(local.devices);
    }

    void begin_more() {
        while (!left_.empty() && work_.size() < static_cast<std::size_t>(local_.jobs)) {
            const Cell& cell = *left_.front();
            left_.pop_front();
            // Somebody else may have come first since.
            const CellState now = state_of(folder_, cell);
            if (is_done(now.state)) continue;
            if (now.state == State::at_work) {
                ++out_.elsewhere;
                continue;
            }
            const auto least = std::ranges::min_element(per_device_);
            std::vector<std::pair<std::string, std::string>> environment;
            const auto device = static_cast<std::size_t>(least - per_device_.begin());
            if (service_)
                environment = service_->environment(device);
            else if (!local_.devices.empty())
                environment.emplace_back("CUDA_VISIBLE_DEVICES", local_.devices[device]);
            const CellFiles files = files_of(folder_, cell.name);
            std::vector<std::string> words = local_.program;
            words.push_back(files.settings);
            work_.push_back({&cell, Child::start(words, files.log, environment), device});
            ++*least;
        }
    }

    void collect_ended() {
        for (auto work = work_.begin(); work != work_.end();) {
            const std::optional<int> status = work->child.ended();
            if (!status) {
                ++work;
                continue;
            }
            --per_device_[work->device];
            judge(*work->cell, *status);
            work = work_.erase(work);
        }
    }

    void stop() {
        out_.interrupted = true;
        left_.clear();
        for (const Work& work : work_) work.child.stop();
    }

    [[nodiscard]] bool idle() const { return work_.empty() && left_.empty(); }
    [[nodiscard]] const Launched& outcome() const { return out_; }

    [[nodiscard]] Progress progress() const {
        Progress p;
        for (const auto& [cell, before] : before_) {
            const CellState now = state_of(folder_, *cell);
            // A run that ended early has no more to do.
            const std::int64_t all = now.state == State::not_finite ? now.steps : cell->steps;
            p.of += std::max<std::int64_t>(all - before, 0);
            p.steps += std::clamp<std::int64_t>(now.steps - before, 0, std::max<std::int64_t>(all - before, 0));
        }
        p.at_work = work_.size();
        p.failed = out_.failed;
        p.left = left_.size();
        return p;
    }

  private:
    void judge(const Cell& cell, int status) {
        const CellState now = state_of(folder_, cell);
        if (is_done(now.state)) {
            ++out_.made;
        } else if (now.state == State::at_work) {  // it found another process there
            ++out_.elsewhere;
        } else if (now.state == State::failed) {
            ++out_.failed;
        } else if (!out_.interrupted) {
            leave_reason(cell, status);
        }
    }

    /// Of a process that could not say it itself.
    void leave_reason(const Cell& cell, int status) {
        const CellFiles files = files_of(folder_, cell.name);
        const std::string said = last_line(files.log);
        const std::string reason =
            status < 0 ? fmt::format("killed by signal {} ({})", -status, ::strsignal(-status))
                       : fmt::format("ended with status {}{}{}", status, said.empty() ? "" : ": ", said);
        ++out_.failed;
        if (const auto lock = FileLock::take(files.lock)) write_failed(files, reason);
    }

    const std::string& folder_;
    const Local& local_;
    std::optional<MultiProcessService> service_;
    std::vector<std::size_t> per_device_;
    std::deque<const Cell*> left_;
    std::vector<Work> work_;
    std::vector<std::pair<const Cell*, std::int64_t>> before_;
    Launched out_;
};

}  // namespace

Launched launch(const std::string& folder, const std::vector<Cell>& cells, const Local& local,
                const std::function<void(const Progress&)>& progress, const std::function<bool()>& cancelled) {
    constexpr auto pause = std::chrono::milliseconds(20);  // a run takes seconds at least
    constexpr auto between_reports = std::chrono::seconds(1);
    Launcher launcher(folder, cells, local);
    Clock::time_point reported = Clock::now();
    bool stopping = false;
    while (true) {
        if (!stopping && cancelled && cancelled()) {
            stopping = true;
            launcher.stop();
        }
        launcher.collect_ended();
        if (!stopping) launcher.begin_more();
        if (launcher.idle()) break;
        if (progress && !stopping && Clock::now() - reported >= between_reports) {
            progress(launcher.progress());
            reported = Clock::now();
        }
        std::this_thread::sleep_for(pause);
    }
    return launcher.outcome();
}

}  // namespace faultline::sweep
