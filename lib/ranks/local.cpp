// SPDX-License-Identifier: Apache-2.0
#include <faultline/ranks/local.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <faultline/ranks/errors.hpp>

namespace faultline {
namespace {

/// "rank/size:word:socket to rank 0,to rank 1,…", -1 where there is none.
constexpr const char* variable = "FAULTLINE_LOCAL_RANK";

class LocalRanks final : public Ranks {
  public:
    /// sockets[i] leads to rank i. `word`: an event counter of 1 that the ranks share.
    LocalRanks(int rank, int word, std::vector<int> sockets)
        : Ranks(rank, static_cast<int>(sockets.size())), sockets_(std::move(sockets)), word_(word) {}
    ~LocalRanks() override {
        close_sockets();
        (void)::close(word_);
        for (const pid_t child : children_)
            while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) continue;
    }
    void keep(std::vector<pid_t> children) { children_ = std::move(children); }

    [[nodiscard]] std::string transport() const override { return "sockets"; }
    void send(int to, std::span<const std::byte> bytes) override {
        while (!bytes.empty()) {
            const ssize_t n = ::send(socket(to), bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) fail(to);
            bytes = bytes.subspan(static_cast<std::size_t>(n));
        }
    }
    void receive(int from, std::span<std::byte> bytes) override {
        // Ranks that step together wait for each other some microseconds: less than it takes to be woken from sleep.
        int patience = 64;
        while (!bytes.empty()) {
            const ssize_t n = ::recv(socket(from), bytes.data(), bytes.size(), patience > 0 ? MSG_DONTWAIT : 0);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
                --patience;
                (void)::sched_yield();
                continue;
            }
            if (n <= 0) fail(from);
            bytes = bytes.subspan(static_cast<std::size_t>(n));
        }
    }
    [[nodiscard]] bool lost() const override {
        for (const int s : sockets_) {
            if (s < 0) continue;
            pollfd ask{.fd = s, .events = POLLRDHUP, .revents = 0};
            if (::poll(&ask, 1, 0) > 0 && (ask.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) return true;
        }
        return false;
    }
    [[nodiscard]] bool take_word() noexcept override {
        std::uint64_t left = 0;  // who takes it leaves none (eventfd(2))
        return ::read(word_, &left, sizeof left) == static_cast<ssize_t>(sizeof left);
    }
    void see_off(std::chrono::milliseconds most) noexcept override {
        const auto until = std::chrono::steady_clock::now() + most;
        std::vector<pollfd> others;
        for (const int s : sockets_)
            if (s >= 0 && ::shutdown(s, SHUT_WR) == 0) others.push_back({.fd = s, .events = POLLIN, .revents = 0});
        // What they still send is taken and dropped: one that waits for room would not look whether we are here.
        std::array<std::byte, 4096> dropped{};
        while (!others.empty()) {
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
            if (left.count() <= 0 || ::poll(others.data(), others.size(), static_cast<int>(left.count())) <= 0) return;
            std::erase_if(others, [&](const pollfd& other) {
                return other.revents != 0 && ::recv(other.fd, dropped.data(), dropped.size(), MSG_DONTWAIT) <= 0;
            });
        }
    }
    void abandon() noexcept override { close_sockets(); }

  private:
    [[nodiscard]] int socket(int of) const { return sockets_.at(static_cast<std::size_t>(of)); }
    [[noreturn]] void fail(int other) const {
        throw PeerLost(fmt::format("rank {} of {} is gone: expected it to stay until the run ends", other, size_));
    }
    void close_sockets() noexcept {
        for (int& s : sockets_)
            if (s >= 0) (void)::close(std::exchange(s, -1));
    }
    std::vector<int> sockets_;
    std::vector<pid_t> children_;
    int word_;
};

[[noreturn]] void fail_for_want_of_files(int size) {
    throw WorkError(
        fmt::format("ranks: no sockets for {} of them ({}): expected fewer, or a higher limit of open files", size,
                    std::strerror(errno)));
}

int new_word(int size) {
    const int word = ::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
    if (word < 0) fail_for_want_of_files(size);
    return word;
}

/// [i][j]: rank i's end of the pair that it shares with rank j, where they speak to each other; else -1.
std::vector<std::vector<int>> socket_pairs(int size) {
    const auto n = static_cast<std::size_t>(size);
    std::vector<std::vector<int>> ends(n, std::vector<int>(n, -1));
    for (std::size_t i = 0; i < n; ++i)
        for (std::size_t j = i + 1; j < n; ++j) {
            if (i != 0 && j != i + 1) continue;
            int pair[2];
            if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) fail_for_want_of_files(size);
            ends[i][j] = pair[0];
            ends[j][i] = pair[1];
        }
    return ends;
}

std::vector<std::string> own_arguments() {
    std::ifstream file("/proc/self/cmdline", std::ios::binary);
    const std::string all{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    std::vector<std::string> arguments;
    for (std::size_t at = 0; at < all.size();) {
        const std::size_t end = all.find('\0', at);
        arguments.push_back(all.substr(at, end - at));
        if (end == std::string::npos) break;
        at = end + 1;
    }
    return arguments;
}

/// In the child, between fork and exec: nothing here asks for memory.
[[noreturn]] void become(const std::vector<int>& sockets, int word, const char* program, char* const* arguments,
                         char* const* environment) {
    for (const int s : sockets)
        if (s >= 0 && ::fcntl(s, F_SETFD, 0) != 0) ::_exit(127);
    if (::fcntl(word, F_SETFD, 0) != 0) ::_exit(127);
    // The first rank has the standard input, and prints.
    ::execve(program, arguments, environment);
    ::_exit(127);
}

bool is_socket(int descriptor) {
    struct stat what {};
    return ::fstat(descriptor, &what) == 0 && S_ISSOCK(what.st_mode);
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> all;
    for (std::string& text : texts) all.push_back(text.data());
    all.push_back(nullptr);
    return all;
}

}  // namespace

std::unique_ptr<Ranks> start_local_ranks(int size) {
    std::vector<std::vector<int>> ends = socket_pairs(size);
    const int word = new_word(size);
    std::vector<std::string> arguments = own_arguments();
    const std::vector<char*> argv = pointers(arguments);
    // By its name, which the system shows; by the link itself where the file has been replaced meanwhile.
    std::error_code replaced;
    std::string program = std::filesystem::read_symlink("/proc/self/exe", replaced).string();
    if (!std::filesystem::exists(program, replaced)) program = "/proc/self/exe";
    std::vector<pid_t> children;
    for (int rank = 1; rank < size; ++rank) {
        const std::vector<int>& sockets = ends[static_cast<std::size_t>(rank)];
        std::vector<std::string> environment;
        for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
        environment.push_back(fmt::format("{}={}/{}:{}:{}", variable, rank, size, word, fmt::join(sockets, ",")));
        const std::vector<char*> envp = pointers(environment);
        const pid_t child = ::fork();
        if (child == 0) become(sockets, word, program.c_str(), argv.data(), envp.data());
        if (child < 0)
            throw WorkError(fmt::format("ranks: the system starts no process {} of {} ({}): expected fewer of them",
                                        rank, size, std::strerror(errno)));
        children.push_back(child);
    }
    for (std::size_t rank = 1; rank < ends.size(); ++rank)
        for (const int s : ends[rank])
            if (s >= 0) (void)::close(s);
    auto all = std::make_unique<LocalRanks>(0, word, std::move(ends[0]));
    all->keep(std::move(children));
    return all;
}

std::unique_ptr<Ranks> local_rank_of_environment() {
    const char* text = std::getenv(variable);
    if (text == nullptr) return nullptr;
    std::vector<int> numbers;
    const char* const end = text + std::strlen(text);
    for (const char* at = text; at < end; ++at) {
        int value = 0;
        const auto [next, error] = std::from_chars(at, end, value);
        if (error != std::errc()) break;
        numbers.push_back(value);
        at = next;
    }
    const bool whole = numbers.size() > 3 && numbers.size() == static_cast<std::size_t>(numbers[1]) + 3 &&
                       numbers[0] > 0 && numbers[0] < numbers[1] && ::fcntl(numbers[2], F_GETFD) >= 0 &&
                       std::all_of(numbers.begin() + 3, numbers.end(), [](int s) { return s < 0 || is_socket(s); }) &&
                       numbers[3] >= 0;
    if (!whole) throw RequestError(fmt::format("{}: is for the program's own use: expected it to be unset", variable));
    // Whatever this process starts is no rank.
    (void)::unsetenv(variable);
    for (std::size_t i = 2; i < numbers.size(); ++i)
        if (numbers[i] >= 0) (void)::fcntl(numbers[i], F_SETFD, FD_CLOEXEC);
    return std::make_unique<LocalRanks>(numbers[0], numbers[2], std::vector<int>(numbers.begin() + 3, numbers.end()));
}

std::vector<std::unique_ptr<Ranks>> connected_ranks(int size) {
    std::vector<std::unique_ptr<Ranks>> all;
    std::vector<std::vector<int>> ends = socket_pairs(size);
    const int word = new_word(size);
    for (int rank = 0; rank < size; ++rank)
        all.push_back(std::make_unique<LocalRanks>(rank, rank == 0 ? word : ::dup(word),
                                                   std::move(ends[static_cast<std::size_t>(rank)])));
    return all;
}

}  // namespace faultline
