// SPDX-License-Identifier: Apache-2.0
// Where a reader's bytes come from: a regular file, or memory (fuzzers, tests). A reader asks for a range only after it
// has checked it against size(), so nothing is allocated on the word of the file alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace faultline {

/// Bytes with a known length and a name for messages.
class Input {
  public:
    virtual ~Input() = default;
    [[nodiscard]] const std::string& name() const { return name_; }
    [[nodiscard]] std::uint64_t size() const { return size_; }
    /// Fills `out` from `offset`; offset + out.size() <= size(). RequestError when the bytes cannot be had.
    virtual void read(std::uint64_t offset, std::span<std::byte> out) const = 0;

  protected:
    std::string name_;
    std::uint64_t size_ = 0;
};

/// A regular file, open for reading. RequestError when it is missing, unreadable or not a regular file (a pipe has no
/// length to check claims against). The file's length is taken once: a file cut while it is read is a RequestError.
class FileInput final : public Input {
  public:
    explicit FileInput(const std::string& path);
    ~FileInput() override;
    FileInput(const FileInput&) = delete;
    FileInput& operator=(const FileInput&) = delete;
    void read(std::uint64_t offset, std::span<std::byte> out) const override;

  private:
    int descriptor_ = -1;
};

/// Somebody else's bytes.
class MemoryInput final : public Input {
  public:
    MemoryInput(std::string name, std::span<const std::byte> bytes);
    void read(std::uint64_t offset, std::span<std::byte> out) const override;

  private:
    std::span<const std::byte> bytes_;
};

}  // namespace faultline
