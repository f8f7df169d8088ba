// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/input.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
    throw RequestError(fmt::format("{}: {}: expected a readable regular file", escaped(path, path.size()), reason));
}

}  // namespace

FileInput::FileInput(const std::string& path) {
    name_ = escaped(path, path.size());
    // O_NONBLOCK: opening a pipe that nobody writes to must not wait. It changes nothing for a regular file.
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor_ < 0) refuse(path, fmt::format("cannot be opened ({})", std::strerror(errno)));
    struct stat status {};
    const bool known = ::fstat(descriptor_, &status) == 0;
    if (!known || !S_ISREG(status.st_mode)) {
        ::close(descriptor_);
        refuse(path, known ? S_ISDIR(status.st_mode) ? "is a folder" : "is not a regular file" : std::strerror(errno));
    }
    size_ = static_cast<std::uint64_t>(status.st_size);
}

FileInput::~FileInput() { ::close(descriptor_); }

void FileInput::read(std::uint64_t offset, std::span<std::byte> out) const {
    while (!out.empty()) {
        const ssize_t got = ::pread(descriptor_, out.data(), out.size(), static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            throw RequestError(fmt::format("{}: cannot be read at byte {} ({}): expected a readable regular file",
                                           name_, offset, std::strerror(errno)));
        if (got == 0)
            throw RequestError(
                fmt::format("{}: ends at byte {}: expected {} bytes, as when it was opened", name_, offset, size_));
        out = out.subspan(static_cast<std::size_t>(got));
        offset += static_cast<std::uint64_t>(got);
    }
}

MemoryInput::MemoryInput(std::string name, std::span<const std::byte> bytes) : bytes_(bytes) {
    name_ = std::move(name);
    size_ = bytes.size();
}

void MemoryInput::read(std::uint64_t offset, std::span<std::byte> out) const {
    const auto from = bytes_.subspan(static_cast<std::size_t>(offset), out.size());
    std::copy(from.begin(), from.end(), out.begin());
}

}  // namespace faultline
