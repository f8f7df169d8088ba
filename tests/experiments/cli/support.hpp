// SPDX-License-Identifier: Apache-2.0
// The real program, run as a user runs it, and small captures to run it on.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <faultline/tensor/tensor.hpp>

namespace faultline::test {

struct Outcome {
    int status = -1;  ///< exit status; -signal where a signal ended it
    std::string out, err;
};

/// Runs `faultline ARGUMENTS…` with standard output and error captured; `environment` is added to ours.
Outcome run_program(const std::vector<std::string>& arguments,
                    const std::map<std::string, std::string>& environment = {});

/// `faultline ARGUMENTS…` at work, for tests that send it signals. Its standard output goes nowhere, its standard error to
/// a file if one is named.
class Child {
  public:
    explicit Child(const std::vector<std::string>& arguments, const std::string& error = "");
    ~Child();  ///< kills it where wait() was not called
    Child(const Child&) = delete;
    Child& operator=(const Child&) = delete;
    [[nodiscard]] int id() const { return pid_; }
    [[nodiscard]] int child() const;  ///< a process that it has started and that lives, or -1
    void signal(int number) const;
    /// Until the program has a handler for the signal, some seconds at most.
    void wait_until_it_catches(int number) const;
    int wait();                               ///< its end, as Outcome::status
    [[nodiscard]] std::string error() const;  ///< what stands in the file

  private:
    int pid_ = -1;
    std::string error_;
};

class Folder;
/// Runs `faultline COMMAND OPTIONS…` and expects it to be refused: exit 2, one sentence on standard error that begins with the
/// command, nothing on standard output, and no file more or less in `folder`, if one is given. Returns the sentence.
std::string refused(const std::string& command, const std::vector<std::string>& options,
                    const Folder* folder = nullptr);

/// A folder of this test's own, empty, removed at the end.
class Folder {
  public:
    Folder();
    ~Folder();
    [[nodiscard]] std::string operator/(const std::string& name) const { return (path_ / name).string(); }
    [[nodiscard]] std::vector<std::string> files() const;  ///< names, sorted
    void write(const std::string& name, const std::string& bytes) const;

  private:
    std::filesystem::path path_;
};

/// Shape of a made-up layer.
struct LayerShape {
    std::int64_t batch = 1, heads = 2, kv_heads = 1, n_q = 24, n_k = 24, d = 16, d_v = 16;
};
/// Adds NAME.{q,k,v,do} of normal deviates in bf16, reproducibly, and an observed kernel NAME.toy.{o,dq}.
void add_layer(TensorSet& set, const std::string& name, const LayerShape& shape = {}, double scale = 1);
/// A set with layer0 and layer1, grouped queries, written to FOLDER/capture.safetensors; returns the path.
std::string small_capture(const Folder& folder);

/// Where the real captures are (FAULTLINE_CAPTURES, or shared/captures beside the source folder); empty where they are not.
std::string captures();

/// Lines of a text, without their ends.
std::vector<std::string> lines(const std::string& text);

}  // namespace faultline::test
