// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"
#include "paths.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <faultline/format/format.hpp>
#include <faultline/tensor/safetensors.hpp>

namespace faultline::test {
namespace {

std::string slurp(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::uint16_t> bf16_normals(std::int64_t count, double scale, std::uint32_t seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<double> normal(0, scale);
    std::vector<std::uint16_t> bits;
    for (std::int64_t i = 0; i < count; ++i) {
        const auto value = static_cast<float>(round(normal(engine), bf16));
        bits.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16));
    }
    return bits;
}

/// Puts the program in this process's place.
[[noreturn]] void become_program(const std::vector<std::string>& arguments) {
    std::vector<std::string> words{program()};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    ::execv(program().c_str(), argv.data());
    ::_exit(127);
}

int end_of(pid_t child) {
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace

Outcome run_program(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& environment) {
    const Folder folder;
    const std::string out = folder / "out", err = folder / "err";
    const pid_t child = ::fork();
    if (child == 0) {
        const int o = ::open(out.c_str(), O_WRONLY | O_CREAT, 0600), e = ::open(err.c_str(), O_WRONLY | O_CREAT, 0600);
        ::dup2(o, STDOUT_FILENO);
        ::dup2(e, STDERR_FILENO);
        for (const auto& [key, value] : environment) ::setenv(key.c_str(), value.c_str(), 1);
        become_program(arguments);
    }
    const int status = end_of(child);
    return {status, slurp(out), slurp(err)};
}

Child::Child(const std::vector<std::string>& arguments, const std::string& error) : error_(error) {
    pid_ = ::fork();
    if (pid_ != 0) return;
    const int null = ::open("/dev/null", O_WRONLY);
    ::dup2(null, STDOUT_FILENO);
    ::dup2(error.empty() ? null : ::open(error.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
    become_program(arguments);
}
Child::~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    (void)end_of(pid_);
}

void Child::signal(int number) const { ::kill(pid_, number); }

void Child::wait_until_it_catches(int number) const {
    const std::string key = "SigCgt:\t";
    for (int i = 0; i < 10000; ++i) {
        const std::string status = slurp("/proc/" + std::to_string(pid_) + "/status");
        const std::size_t at = status.find(key);
        if (at != std::string::npos &&
            (std::stoull(status.substr(at + key.size(), 16), nullptr, 16) >> (number - 1) & 1) != 0)
            return;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ADD_FAILURE() << "no handler for signal " << number;
}

int Child::child() const {
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
        const std::string id = entry.path().filename().string();
        if (id.find_first_not_of("0123456789") != std::string::npos) continue;
        const std::string stat = slurp(entry.path() / "stat");  // "PID (NAME) S PARENT …"
        const std::size_t close = stat.rfind(')');
        if (close != std::string::npos && std::atoi(stat.c_str() + close + 4) == pid_) return std::atoi(id.c_str());
    }
    return -1;
}

int Child::wait() { return end_of(std::exchange(pid_, -1)); }
std::string Child::error() const { return slurp(error_); }

Folder::Folder() {
    static std::atomic<int> number{0};
    path_ = std::filesystem::temp_directory_path() /
            ("faultline-cli-" + std::to_string(::getpid()) + "-" + std::to_string(number++));
    std::filesystem::create_directories(path_);
}
Folder::~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> Folder::files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
        names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}

void Folder::write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
}

void add_layer(TensorSet& set, const std::string& name, const LayerShape& s, double scale) {
    std::uint32_t seed = static_cast<std::uint32_t>(set.tensors.size());
    const auto put = [&](const std::string& tensor, std::vector<std::int64_t> shape, double size) {
        std::int64_t count = 1;
        for (const std::int64_t extent : shape) count *= extent;
        const std::vector<std::uint16_t> bits = bf16_normals(count, size, ++seed);
        set.add(make_tensor<std::uint16_t>(name + "." + tensor, std::move(shape), bits, Dtype::bf16));
    };
    put("q", {s.batch, s.heads, s.n_q, s.d}, scale);
    put("k", {s.batch, s.kv_heads, s.n_k, s.d}, scale);
    put("v", {s.batch, s.kv_heads, s.n_k, s.d_v}, 1);
    put("do", {s.batch, s.heads, s.n_q, s.d_v}, 1);
    put("toy.o", {s.batch, s.heads, s.n_q, s.d_v}, 1);
    put("toy.dq", {s.batch, s.heads, s.n_q, s.d}, 1);
}

std::string small_capture(const Folder& folder) {
    TensorSet set;
    add_layer(set, "layer0");
    add_layer(set, "layer1", {}, 4);
    std::string path = folder / "capture.safetensors";
    write_safetensors(path, set);
    return path;
}

std::string captures() {
    const char* named = std::getenv("FAULTLINE_CAPTURES");
    const std::filesystem::path folder = named != nullptr ? named : source_dir() / "../shared/captures";
    std::error_code error;
    return std::filesystem::exists(folder / "biased128-600.safetensors", error) ? folder.string() : "";
}

std::vector<std::string> lines(const std::string& text) {
    std::vector<std::string> all;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) all.push_back(line);
    return all;
}

std::string refused(const std::string& command, const std::vector<std::string>& options, const Folder* folder) {
    const std::vector<std::string> before = folder != nullptr ? folder->files() : std::vector<std::string>{};
    std::vector<std::string> words{command};
    words.insert(words.end(), options.begin(), options.end());
    const Outcome run = run_program(words);
    EXPECT_EQ(run.status, 2) << run.err;
    EXPECT_EQ(run.out, "");
    EXPECT_EQ(lines(run.err).size(), 1u) << run.err;
    EXPECT_TRUE(run.err.starts_with("faultline " + command + ": ")) << run.err;
    if (folder != nullptr) {
        EXPECT_EQ(folder->files(), before) << "a file was left behind";
    }
    return run.err;
}

}  // namespace faultline::test
