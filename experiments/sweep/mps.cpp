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

#include <sys/stat.h>
#include <unistd.h>

#include <faultline/base/error.hpp>
#include <faultline/sweep/child.hpp>

namespace faultline::sweep {
namespace {

namespace fs = std::filesystem;

constexpr const char* control = "nvidia-cuda-mps-control";
constexpr const char* folders = "faultline-mps-";
/// In a service's folder; its launcher has it locked as long as it lives.
constexpr const char* lock_file = "launcher.lock";

using Environment = std::vector<std::pair<std::string, std::string>>;

/// Of what uses the service whose sockets are in `pipe`. The card is the service's first one, by whatever name it was given to it.
Environment environment_of(const std::string& pipe) {
    return {{"CUDA_MPS_PIPE_DIRECTORY", pipe}, {"CUDA_MPS_LOG_DIRECTORY", pipe}, {"CUDA_VISIBLE_DEVICES", "0"}};
}

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
void begin(const std::string& device, const std::string& pipe) {
    Environment environment = environment_of(pipe);
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

void quit(const std::string& pipe) {
    (void)wait_for(
        Child::start({"sh", "-c", fmt::format("echo quit | {}", control)}, pipe + "/end.log", environment_of(pipe)),
        std::chrono::seconds(10));
}

/// The services of launchers that were killed outright, which end nothing: of this user, with a lock that nobody holds.
void end_those_left_behind() {
    std::error_code ignored;
    std::vector<fs::path> found;
    for (const fs::directory_entry& entry : fs::directory_iterator(fs::temp_directory_path(), ignored))
        if (entry.path().filename().string().starts_with(folders)) found.push_back(entry.path());
    for (const fs::path& folder : found) {
        struct stat of {};
        if (::lstat(folder.c_str(), &of) != 0 || !S_ISDIR(of.st_mode) || of.st_uid != ::geteuid() ||
            !fs::exists(folder / lock_file, ignored))
            continue;
        const std::optional<FileLock> lock = FileLock::take(folder / lock_file);
        if (!lock) continue;
        for (const fs::directory_entry& pipe : fs::directory_iterator(folder, ignored))
            if (pipe.is_directory(ignored)) quit(pipe.path());
        fs::remove_all(folder, ignored);
    }
}

}  // namespace

MultiProcessService::MultiProcessService(const std::vector<std::string>& devices) {
    end_those_left_behind();
    std::string name = (fs::temp_directory_path() / (std::string(folders) + "XXXXXX")).string();
    if (::mkdtemp(name.data()) == nullptr)
        throw WorkError(fmt::format("mps: {}: cannot be made: expected a writable folder for temporary files", name));
    folder_ = name;
    try {
        lock_.emplace(FileLock::wait(folder_ + "/" + lock_file));
        for (const std::string& device : devices) {
            const std::string pipe = fmt::format("{}/{}", folder_, pipes_.size());
            fs::create_directory(pipe);
            pipes_.push_back(pipe);
            begin(device, pipe);
        }
    } catch (...) {
        end();
        throw;
    }
}

MultiProcessService::~MultiProcessService() { end(); }

void MultiProcessService::end() {
    try {
        for (const std::string& pipe : pipes_) quit(pipe);
    } catch (const std::exception&) {  // no process can be made; nothing here can help that
    }
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
}

std::vector<std::pair<std::string, std::string>> MultiProcessService::environment(std::size_t device) const {
    return environment_of(pipes_.at(device));
}

}  // namespace faultline::sweep
