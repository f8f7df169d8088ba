// SPDX-License-Identifier: Apache-2.0
#include <faultline/sweep/mps.hpp>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/sweep/child.hpp>

namespace faultline::sweep {
namespace {

namespace fs = std::filesystem;

constexpr const char* control = "nvidia-cuda-mps-control";

/// The exit status; none where it has not ended in time.
std::optional<int> wait_for(Child child, std::chrono::seconds most) {
    const auto end = std::chrono::steady_clock::now() + most;
    while (std::chrono::steady_clock::now() < end) {
        if (const std::optional<int> status = child.ended()) return status;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return std::nullopt;
}

/// `nvidia-cuda-mps-control -d` forks and ends; the other half stays.
void begin(const std::string& device, const std::string& pipe,
           std::vector<std::pair<std::string, std::string>> environment) {
    environment.emplace_back("CUDA_VISIBLE_DEVICES", device);
    const std::string log = pipe + "/begin.log";
    const std::optional<int> status =
        wait_for(Child::start({control, "-d"}, log, environment), std::chrono::seconds(10));
    if (status == 0) return;
    std::ifstream in(log);
    std::string said{std::istreambuf_iterator<char>(in), {}};
    while (!said.empty() && said.back() == '\n') said.pop_back();
    throw WorkError(fmt::format("mps: {} -d: {}{}{}: expected NVIDIA's multi-process service, or no mps", control,
                                !status          ? "does not come back"
                                : *status == 127 ? "is not there"
                                                 : fmt::format("status {}", *status),
                                said.empty() ? "" : ": ", said));
}

}  // namespace

MultiProcessService::MultiProcessService(const std::vector<std::string>& devices) {
    std::string name = (fs::temp_directory_path() / "faultline-mps-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr)
        throw WorkError(fmt::format("mps: {}: cannot be made: expected a writable folder for temporary files", name));
    folder_ = name;
    try {
        for (const std::string& device : devices) {
            const std::string pipe = fmt::format("{}/{}", folder_, pipes_.size());
            fs::create_directory(pipe);
            pipes_.push_back(pipe);
            begin(device, pipe, environment(pipes_.size() - 1));
        }
    } catch (...) {
        end();
        throw;
    }
}

MultiProcessService::~MultiProcessService() { end(); }

void MultiProcessService::end() {
    try {
        for (std::size_t i = 0; i < pipes_.size(); ++i)
            (void)wait_for(Child::start({"sh", "-c", fmt::format("echo quit | {}", control)}, pipes_[i] + "/end.log",
                                        environment(i)),
                           std::chrono::seconds(10));
    } catch (const std::exception&) {  // no process can be made; nothing here can help that
    }
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
}

std::vector<std::pair<std::string, std::string>> MultiProcessService::environment(std::size_t device) const {
    // The card is the service's first one, by whatever name it was given to it.
    return {{"CUDA_MPS_PIPE_DIRECTORY", pipes_.at(device)},
            {"CUDA_MPS_LOG_DIRECTORY", pipes_.at(device)},
            {"CUDA_VISIBLE_DEVICES", "0"}};
}

}  // namespace faultline::sweep
