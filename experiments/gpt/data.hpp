// SPDX-License-Identifier: Apache-2.0
// Tokens to train on: bytes of text, llm.c shards, nanoGPT's train.bin and val.bin; and which windows of them make a batch.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/record/manifest.hpp>

namespace faultline::gpt {

enum class DataFormat : unsigned char {
    automatic,  ///< a folder with train.bin: nanogpt; files *.bin that begin with llm.c's magic: llmc; else text, but a
                ///< folder that holds shards and other files is refused
    text,       ///< a file or a folder of files: their bytes
    llmc,  ///< llm.c, dev/data/data_common.py: 256 little-endian int32 (magic 20240520, version 1, count), uint16 ids;
           ///< magic 20240801, version 7: uint32 ids
    nanogpt,  ///< nanoGPT, data/openwebtext/prepare.py: uint16 ids and nothing else, train.bin and val.bin
};

/// Where tokens come from. Held out for validation: of text every sixteenth block of 64 KiB (the blocks around it stay in
/// order, so a training window may span the gap); of a folder's shards those with "val" in their name, else the last sixteenth;
/// of nanoGPT's folders val.bin, else the last sixteenth of train.bin.
struct TokenData {
    std::string source;    ///< as given
    int vocabulary = 256;  ///< ids are below it: 256 for bytes, 50257 for GPT-2's, 128256 for Llama 3's
    std::vector<std::int32_t> training, validation;
    std::vector<InputHash> inputs;  ///< of a folder of text one entry: the hash of its files' names and hashes
    std::string remark;             ///< to be said of what is not there, one sentence; empty: nothing
};

/// RequestError, one sentence with file, field and expectation: missing, unreadable, wrong magic or version, a length that is
/// not the header's, too few tokens.
[[nodiscard]] TokenData read_tokens(const std::string& path, DataFormat format = DataFormat::automatic);
/// The default text: the manual in the package perl-doc of Debian 12. RequestError where the package is
/// not installed or its text is not the one whose hash is known; the sentence says what to do.
[[nodiscard]] TokenData default_tokens();
/// Where default_tokens() looks: FAULTLINE_TEXT of the environment, or where the package puts it.
[[nodiscard]] std::string default_text_folder();
/// The files below a folder whose name passes, in the order of their paths, as one text. RequestError.
[[nodiscard]] TokenData read_text_files(const std::string& folder, const std::function<bool(const std::string&)>& take);

/// Text given as such; for tests.
[[nodiscard]] TokenData tokens_of_text(std::string_view text);

/// RequestError where an id is not below `vocabulary` or a split is shorter than `length` + 1 tokens.
void check_tokens(const TokenData& data, int vocabulary, int length);

/// Offsets of the windows of each optimizer step.
class WindowOrder {
  public:
    /// Random windows, a function of (seed, step, position in the step) alone.
    explicit WindowOrder(std::uint64_t seed) : seed_(seed) {}
    /// A replay: a text file with a line for each step, offsets separated by commas or blanks; or a folder with
    /// generated_indices_rank_R.txt, R = 0, 1, …, as the code of arXiv 2510.04212 writes, whose lines are joined in the order
    /// of the ranks. RequestError.
    static WindowOrder replay(const std::string& path);

    /// `windows` offsets for this step, each at most tokens - length - 1. RequestError where a replay has another number of
    /// them, has no such step, or an offset beyond.
    [[nodiscard]] std::vector<std::int64_t> offsets(std::int64_t step, std::size_t windows, std::size_t tokens,
                                                    int length) const;
    /// RequestError where offsets() would throw in one of the steps 0 to steps - 1.
    void check(std::int64_t steps, std::size_t windows, std::size_t tokens, int length) const;
    /// What a replay file holds for this step: to write one.
    [[nodiscard]] static std::string line(std::span<const std::int64_t> offsets);
    /// Files of a replay, for the manifest.
    [[nodiscard]] const std::vector<InputHash>& inputs() const { return inputs_; }

  private:
    std::uint64_t seed_ = 0;
    std::string source_;
    std::optional<std::vector<std::vector<std::int64_t>>> steps_;
    std::vector<InputHash> inputs_;
};

/// The windows at these offsets and what follows each token.
struct Windows {
    std::vector<std::int32_t> tokens, targets;
};
[[nodiscard]] Windows windows_at(std::span<const std::int32_t> tokens, std::span<const std::int64_t> offsets,
                                 int length);

}  // namespace faultline::gpt
