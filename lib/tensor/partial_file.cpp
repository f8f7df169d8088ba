// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/partial_file.hpp>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& name, int error) {
    throw WorkError(fmt::format("{}: cannot be written ({}): expected a writable folder with room for it", name,
                                std::strerror(error)));
}

[[noreturn]] void fail_locked(const std::string& name) {
    throw WorkError(fmt::format("{}: is being written by another process: expected to be its only writer", name));
}

/// False when another process holds the lock; a file system without locks counts as ours.
bool lock(int descriptor) { return ::flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK; }

/// Errno, or 0. A file that is there is not replaced: EEXIST.
int rename_to_new(const char* from, const char* to) {
    if (::renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) return 0;
    if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) return errno;
    // A file system that cannot: a second name, or without those the nearest there is.
    if (::link(from, to) == 0) return ::unlink(from) == 0 ? 0 : errno;
    if (errno == EEXIST) return EEXIST;
    struct stat there {};
    if (::lstat(to, &there) == 0) return EEXIST;
    return std::rename(from, to) == 0 ? 0 : errno;
}

/// Names that a signal handler can read: no allocation and no lock. Static, so that they outlive every thread.
struct PendingName {
    enum State : int { free, taken, whole };
    std::atomic<int> state{free};
    std::array<char, 4096> path{};
};
static_assert(std::atomic<int>::is_always_lock_free);
std::array<PendingName, 64> pending_names;

/// The slot, or -1.
int remember(const std::string& path) {
    if (path.size() >= pending_names[0].path.size()) return -1;
    for (std::size_t i = 0; i < pending_names.size(); ++i) {
        PendingName& slot = pending_names[i];
        int expected = PendingName::free;
        if (!slot.state.compare_exchange_strong(expected, PendingName::taken)) continue;
        std::memcpy(slot.path.data(), path.c_str(), path.size() + 1);
        slot.state = PendingName::whole;
        return static_cast<int>(i);
    }
    return -1;
}

}  // namespace

void remove_partial_files() noexcept {
    for (PendingName& slot : pending_names)
        if (slot.state == PendingName::whole) ::unlink(slot.path.data());
}

PartialName::PartialName(const std::string& path) : given_(escaped(path, path.size())), final_(path) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (path.empty() || (fs::exists(status) && !fs::is_regular_file(status))) {
        throw RequestError(fmt::format("{}: exists and is not a regular file: expected the name of a file to write",
                                       path.empty() ? "\"\"" : given_));
    }
    std::error_code no_link;
    if (!fs::exists(status) && fs::is_symlink(fs::symlink_status(path, no_link)))
        throw RequestError(fmt::format("{}: is a link to nothing: expected the name of a file to write", given_));
    replaces_ = fs::exists(status);
    if (replaces_) final_ = fs::canonical(path, error).string();
    if (error || final_.empty()) final_ = path;
    const fs::path folder = fs::path(final_).parent_path();
    if (!folder.empty() && !fs::is_directory(folder, error)) {
        throw RequestError(fmt::format("{}: folder {} does not exist: expected an existing folder", given_,
                                       in_quotes(folder.string())));
    }
    partial_ = final_ + ".partial";
    if (fs::path(partial_).filename().string().size() > NAME_MAX)
        throw RequestError(fmt::format("{}: the name is too long: expected at most {} bytes", given_,
                                       NAME_MAX - std::string_view(".partial").size()));
    const int existing = ::open(partial_.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    if (existing >= 0) {
        const bool ours = lock(existing);
        ::close(existing);
        if (!ours) fail_locked(given_);
    }
    pending_ = true;
    slot_ = remember(partial_);
}

PartialName::~PartialName() {
    if (pending_) ::unlink(partial_.c_str());
    forget();
}

void PartialName::forget() {
    pending_ = false;
    if (slot_ >= 0) pending_names[static_cast<std::size_t>(slot_)].state = PendingName::free;
    slot_ = -1;
}

PartialName::PartialName(PartialName&& other) noexcept { *this = std::move(other); }

PartialName& PartialName::operator=(PartialName&& other) noexcept {
    std::swap(given_, other.given_);
    std::swap(final_, other.final_);
    std::swap(partial_, other.partial_);
    std::swap(pending_, other.pending_);
    std::swap(slot_, other.slot_);
    std::swap(replaces_, other.replaces_);
    return *this;
}

void PartialName::commit(bool durable) {
    if (durable) {
        const int descriptor = ::open(partial_.c_str(), O_RDONLY | O_CLOEXEC);
        if (descriptor < 0) fail(given_, errno);
        const int synced = ::fsync(descriptor);
        const int error = errno;
        ::close(descriptor);
        if (synced != 0) fail(given_, error);
    }
    if (replaces_) {
        if (std::rename(partial_.c_str(), final_.c_str()) != 0) fail(given_, errno);
    } else if (const int error = rename_to_new(partial_.c_str(), final_.c_str()); error == EEXIST) {
        forget();
        throw WorkError(fmt::format("{}: has appeared since the work began: expected no such file; ours is {}", given_,
                                    escaped(partial_, partial_.size())));
    } else if (error != 0) {
        fail(given_, error);
    }
    forget();
}

PartialFile::PartialFile(const std::string& path) : name_(path) {
    descriptor_ = ::open(name_.partial().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor_ < 0) fail(name_.given(), errno);
    // Truncated only once the lock is ours: another process may be writing the same result.
    if (!lock(descriptor_)) {
        ::close(descriptor_);
        name_.abandon();
        fail_locked(name_.given());
    }
    if (::ftruncate(descriptor_, 0) != 0) {
        const int error = errno;
        ::close(descriptor_);
        fail(name_.given(), error);
    }
}

PartialFile::~PartialFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
}

void PartialFile::write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t put = ::write(descriptor_, bytes.data(), bytes.size());
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) fail(name_.given(), errno);
        bytes = bytes.subspan(static_cast<std::size_t>(put));
    }
}

void PartialFile::keep() {
    const int closed = ::close(std::exchange(descriptor_, -1));
    if (closed != 0) fail(name_.given(), errno);
    name_.keep();
}

void PartialFile::commit() {
    const int closed = ::close(std::exchange(descriptor_, -1));
    if (closed != 0) fail(name_.given(), errno);
    name_.commit();
}

}  // namespace faultline
