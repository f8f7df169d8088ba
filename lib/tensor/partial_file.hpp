// SPDX-License-Identifier: Apache-2.0
// A file appears under its name whole or not at all: it is written as NAME.partial in the same folder and renamed.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace faultline {

/// The two names of a file that is being written. Destroyed before commit(), it removes the partial file.
class PartialName {
  public:
    /// RequestError when `path` exists and is not a regular file (renaming over a device would remove it) or its folder
    /// does not exist, or the name is too long for a file system; WorkError when another process holds NAME.partial locked, that is, is writing it. A symbolic link
    /// is followed: what it points to is replaced, not the link; a link to nothing is refused.
    explicit PartialName(const std::string& path);
    ~PartialName();
    PartialName(PartialName&&) noexcept;
    PartialName& operator=(PartialName&&) noexcept;

    [[nodiscard]] const std::string& given() const { return given_; }       ///< as given, for messages (escaped)
    [[nodiscard]] const std::string& partial() const { return partial_; }   ///< where to write
    [[nodiscard]] const std::string& final_name() const { return final_; }  ///< where commit() puts it
    /// Renames. With `durable`, the bytes are on the disk before the name is. WorkError; also where there was no file at
    /// first and one has appeared since: it stays, and so does the partial file.
    void commit(bool durable = true);
    /// Leaves the partial file under its name, for good.
    void keep() { forget(); }
    /// Leaves the partial file where it is: it is somebody else's.
    void abandon() { forget(); }

  private:
    void forget();

    std::string given_, final_, partial_;
    bool pending_ = false;
    int slot_ = -1;          ///< among the names that remove_partial_files() knows; -1: none was free
    bool replaces_ = false;  ///< a file was there
};

/// Removes all partial files that this process has not committed, for a signal that ends it at once: async-signal-safe. Of
/// more than 64 at a time the later ones are left.
void remove_partial_files() noexcept;

/// A plain file written front to back. WorkError "out.npy: cannot be written (No space left on device): …".
class PartialFile {
  public:
    /// WorkError when another process is writing the same file.
    explicit PartialFile(const std::string& path);
    ~PartialFile();
    PartialFile(const PartialFile&) = delete;
    PartialFile& operator=(const PartialFile&) = delete;
    void write(std::span<const std::byte> bytes);
    void commit();
    /// Ends the file as NAME.partial and leaves NAME as it is.
    void keep();

  private:
    PartialName name_;
    int descriptor_ = -1;
};

}  // namespace faultline
