// SPDX-License-Identifier: Apache-2.0
// What the reader tests share: a folder of their own, bytes on disk, and the sentence that a call ends with.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>

namespace faultline::test {

namespace fs = std::filesystem;

/// A fresh folder, removed at the end of the test.
class Folder {
  public:
    Folder() {
        std::string name = (fs::temp_directory_path() / "faultline-test-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
        path_ = name;
    }
    ~Folder() {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    [[nodiscard]] std::string operator/(std::string_view name) const { return (path_ / name).string(); }
    [[nodiscard]] const fs::path& path() const { return path_; }
    [[nodiscard]] bool empty() const { return fs::is_empty(path_); }

  private:
    fs::path path_;
};

inline void write_file(const std::string& path, std::string_view bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_file(const std::string& path) {
    std::ostringstream out;
    out << std::ifstream(path, std::ios::binary).rdbuf();
    return out.str();
}

/// The sentence of the RequestError that the call throws; fails the test when it throws none.
template <class Call>
std::string request_error(Call&& call) {
    try {
        call();
    } catch (const RequestError& error) {
        return error.what();
    } catch (const std::exception& error) {
        ADD_FAILURE() << "expected a RequestError, got: " << error.what();
        return {};
    }
    ADD_FAILURE() << "expected a RequestError, got none";
    return {};
}

/// The same for WorkError.
template <class Call>
std::string work_error(Call&& call) {
    try {
        call();
    } catch (const WorkError& error) {
        return error.what();
    } catch (const std::exception& error) {
        ADD_FAILURE() << "expected a WorkError, got: " << error.what();
        return {};
    }
    ADD_FAILURE() << "expected a WorkError, got none";
    return {};
}

}  // namespace faultline::test
