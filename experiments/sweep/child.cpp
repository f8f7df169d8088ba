// SPDX-License-Identifier: Apache-2.0
#include <faultline/sweep/child.hpp>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <faultline/base/error.hpp>

namespace faultline::sweep {
namespace {

constexpr int no_such_program = 127;  // as a shell has it

int end_of(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status); }

std::vector<char*> pointers(std::vector<std::string>& words) {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    return argv;
}

[[noreturn]] void fail_to_start(const std::string& program) {
    throw WorkError(
        fmt::format("{}: no process can be made ({}): expected room for one more", program, std::strerror(errno)));
}

}  // namespace

Child Child::start(const std::vector<std::string>& words, const std::string& log,
                   const std::vector<std::pair<std::string, std::string>>& environment) {
    std::vector<std::string> own = words;
    const std::vector<char*> argv = pointers(own);
    const pid_t parent = ::getpid(), pid = ::fork();
    if (pid < 0) fail_to_start(words.front());
    if (pid != 0) return Child(pid);
    (void)::setpgid(0, 0);
    (void)::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(no_such_program);  // it was gone before it was watched
    const int null = ::open("/dev/null", O_RDONLY), out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666);
    ::dup2(null, STDIN_FILENO);
    ::dup2(out < 0 ? null : out, STDOUT_FILENO);
    ::dup2(out < 0 ? null : out, STDERR_FILENO);
    for (const auto& [key, value] : environment) ::setenv(key.c_str(), value.c_str(), 1);
    ::execvp(argv.front(), argv.data());
    ::_exit(no_such_program);
}

std::optional<int> Child::ended() {
    int status = 0;
    if (pid_ < 0 || ::waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
    pid_ = -1;
    return end_of(status);
}

void Child::stop() const {
    if (pid_ > 0) ::kill(pid_, SIGTERM);
}

Said run_to_end(const std::vector<std::string>& words) {
    std::array<int, 2> out{}, err{};
    if (::pipe2(out.data(), O_CLOEXEC) != 0 || ::pipe2(err.data(), O_CLOEXEC) != 0) fail_to_start(words.front());
    std::vector<std::string> own = words;
    const std::vector<char*> argv = pointers(own);
    const pid_t pid = ::fork();
    if (pid < 0) fail_to_start(words.front());
    if (pid == 0) {
        ::dup2(out[1], STDOUT_FILENO);
        ::dup2(err[1], STDERR_FILENO);
        ::execvp(argv.front(), argv.data());
        ::_exit(no_such_program);
    }
    ::close(out[1]);
    ::close(err[1]);
    Said said;
    std::array<pollfd, 2> ends{{{out[0], POLLIN, 0}, {err[0], POLLIN, 0}}};
    const std::array<std::string*, 2> texts{&said.out, &said.err};
    for (int open = 2; open > 0;) {
        if (::poll(ends.data(), ends.size(), -1) < 0) continue;  // a signal
        for (std::size_t i = 0; i < ends.size(); ++i) {
            if (ends[i].fd < 0 || ends[i].revents == 0) continue;
            std::array<char, 4096> bytes{};
            const ssize_t count = ::read(ends[i].fd, bytes.data(), bytes.size());
            if (count > 0) {
                texts[i]->append(bytes.data(), static_cast<std::size_t>(count));
                continue;
            }
            if (count < 0 && errno == EINTR) continue;
            ::close(ends[i].fd);
            ends[i].fd = -1;
            --open;
        }
    }
    int status = 0;
    while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    said.status = end_of(status);
    return said;
}

}  // namespace faultline::sweep
