// SPDX-License-Identifier: Apache-2.0
#include <faultline/sweep/cell_state.hpp>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <faultline/base/error.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::sweep {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

/// The whole file, for writing.
struct flock whole_file() {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    return lock;
}

int open_lock(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor < 0)
        throw WorkError(fmt::format("{}: cannot be made ({}): expected a writable folder", escaped(path, path.size()),
                                    std::strerror(errno)));
    return descriptor;
}

[[noreturn]] void refuse_lock(const std::string& path, int descriptor) {
    const int error = errno;
    ::close(descriptor);
    throw WorkError(fmt::format("{}: cannot be locked ({}): expected a file system with POSIX locks",
                                escaped(path, path.size()), std::strerror(error)));
}

/// Whether some process holds it. Never takes it.
bool is_held(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return false;
    struct flock lock = whole_file();
    const bool held = ::fcntl(descriptor, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
    ::close(descriptor);
    return held;
}

std::string text_of(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

void write_result(const CellFiles& files, const ordered_json& result) {
    const std::string text = result.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
    PartialFile file(files.result);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
}

}  // namespace

std::optional<FileLock> FileLock::take(const std::string& path) {
    const int descriptor = open_lock(path);
    struct flock lock = whole_file();
    if (::fcntl(descriptor, F_SETLK, &lock) == 0) return FileLock(descriptor);
    if (errno != EACCES && errno != EAGAIN) refuse_lock(path, descriptor);
    ::close(descriptor);
    return std::nullopt;
}

FileLock FileLock::wait(const std::string& path) {
    const int descriptor = open_lock(path);
    struct flock lock = whole_file();
    while (::fcntl(descriptor, F_SETLKW, &lock) != 0)
        if (errno != EINTR) refuse_lock(path, descriptor);
    return FileLock(descriptor);
}

FileLock::FileLock(FileLock&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
FileLock::~FileLock() {
    if (descriptor_ >= 0) ::close(descriptor_);
}

void FileLock::say(std::int64_t steps) const {
    std::array<char, 256> host{};
    (void)::gethostname(host.data(), host.size() - 1);
    // One write of a fixed length, so that whoever reads meanwhile finds one or the other.
    const std::string line = fmt::format("{:<12} {}, process {}\n", steps, host.data(), ::getpid());
    if (::pwrite(descriptor_, line.data(), line.size(), 0) == static_cast<ssize_t>(line.size()))
        (void)::ftruncate(descriptor_, static_cast<off_t>(line.size()));
}

std::string_view name(State state) {
    constexpr std::array<std::string_view, 6> names{"to do", "at work", "stopped", "failed", "done", "not finite"};
    return names.at(static_cast<std::size_t>(state));
}

CellState state_of(const std::string& folder, const Cell& cell) {
    const CellFiles files = files_of(folder, cell.name);
    CellState out;
    // Before the result is looked for: who ends in between has left one.
    const bool held = is_held(files.lock);
    const std::string said = text_of(files.lock);
    (void)std::from_chars(said.data(), said.data() + said.size(), out.steps);
    if (const std::size_t space = said.find_first_not_of(' ', std::min(said.find(' '), said.size()));
        space != std::string::npos)
        out.what = said.substr(space, said.find('\n') - space);
    if (held) {
        out.state = State::at_work;
        return out;
    }
    const ordered_json result = ordered_json::parse(text_of(files.result), nullptr, false);
    if (result.is_object()) {
        const std::string end = result.value("end", "");
        if (end == "failed") {
            out.state = State::failed;
            out.what = result.value("reason", "");
            return out;
        }
        if (end == "finished" || end == "not_finite") {
            out.steps = result.value("steps", std::int64_t{0});
            out.state = end == "finished" ? State::done : State::not_finite;
            out.what = result.value("not_finite", "");
            // The run may have been removed to be made anew; one that ended in its first step has no record.
            if (out.steps == 0 || fs::exists(files.record)) return out;
            out = {};
        }
    }
    if (said.empty()) return out;
    out.state = State::stopped;
    return out;
}

void write_done(const CellFiles& files, std::int64_t steps, const std::string& not_finite) {
    ordered_json result{{"schema", "faultline.sweep-result/1"},
                        {"end", not_finite.empty() ? "finished" : "not_finite"},
                        {"steps", steps}};
    if (!not_finite.empty()) result["not_finite"] = not_finite;
    write_result(files, result);
}

void write_failed(const CellFiles& files, const std::string& reason) {
    write_result(files, {{"schema", "faultline.sweep-result/1"}, {"end", "failed"}, {"reason", reason}});
}

bool has_result(const CellFiles& files) {
    const ordered_json result = ordered_json::parse(text_of(files.result), nullptr, false);
    const std::string end = result.is_object() ? result.value("end", "") : "";
    if (end != "finished" && end != "not_finite") return false;
    return result.value("steps", std::int64_t{0}) == 0 || fs::exists(files.record);
}

void forget_failure(const CellFiles& files) {
    const ordered_json result = ordered_json::parse(text_of(files.result), nullptr, false);
    std::error_code ignored;
    if (!result.is_object() || result.value("end", "") == "failed") fs::remove(files.result, ignored);
}

}  // namespace faultline::sweep
