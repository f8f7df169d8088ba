// SPDX-License-Identifier: Apache-2.0
// Where a result came from: written as root attributes of every file, so that a figure can be traced to a command, a
// commit, a build, a machine and the bytes it was made of.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace faultline {

/// One file that went in, and "xxh3-128:" with 32 hexadecimal digits (XXH3, xxhash 0.8) of its bytes.
struct InputHash {
    std::string path;
    std::string hash;
    bool operator==(const InputHash&) const = default;
};

/// The newest layout of any kind of file that this build writes and reads.
inline constexpr int newest_schema_version = 1;

struct Manifest {
    std::string kind;          ///< "attribution", "run", "dissociation", "capture"
    std::string schema;        ///< "faultline.KIND"
    int schema_version = 1;    ///< raised when a reader of the old layout would misread the new one
    std::string created_utc;   ///< ISO 8601, seconds: 2025-10-07T12:34:56Z
    std::string command_line;  ///< as typed, quoted for a POSIX shell
    std::string config_toml;   ///< the whole configuration in force
    std::string git_commit;    ///< 40 digits, "-dirty" behind it if files were changed; "unknown" without git
    std::string build;         ///< compiler, build type, flags, -ffp-contract and -fmad
    std::string cpu;           ///< model name
    std::string gpu = "none";  ///< model name where a device was used
    std::uint64_t seed = 0;
    std::vector<InputHash> inputs;
    int ranks = 0;           ///< processes of a training run; 0: not of a run, and not written
    std::string reductions;  ///< what they added up, by what and in which order
};

/// A manifest of this moment, build and machine; inputs and gpu are the caller's to add.
[[nodiscard]] Manifest make_manifest(std::string kind, std::string command_line, std::string config_toml,
                                     std::uint64_t seed);
/// argv as one line that a POSIX shell would split into the same words.
[[nodiscard]] std::string shell_line(int argc, const char* const* argv);
/// "xxh3-128:" and the hash of a text's bytes, as InputHash has it.
[[nodiscard]] std::string hash_text(std::string_view text);
/// Hash of a file's bytes. RequestError when it cannot be read.
[[nodiscard]] std::string hash_file(const std::string& path);
/// Hashes of a file, or of every .npy file of a folder by name: what read_tensors(path) reads.
[[nodiscard]] std::vector<InputHash> hash_inputs(const std::string& path);

}  // namespace faultline
