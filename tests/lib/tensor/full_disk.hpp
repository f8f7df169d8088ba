// SPDX-License-Identifier: Apache-2.0
// A disk without room, without a disk: the system's limit on the size of a file.
#pragma once

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <stdexcept>
#include <string>

#include <faultline/base/error.hpp>

namespace faultline::test {

/// Runs the call in a child that may write files of at most `limit` bytes and says how it went; "" for no error.
template <class Call>
std::string with_file_limit(rlim_t limit, Call&& call) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
    const pid_t child = ::fork();
    if (child == 0) {
        std::signal(SIGXFSZ, SIG_IGN);  // writes then fail with EFBIG, as with ENOSPC on a full disk
        const rlimit size{limit, limit};
        ::setrlimit(RLIMIT_FSIZE, &size);
        std::string said;
        try {
            call();
        } catch (const WorkError& error) {
            said = error.what();
        } catch (const std::exception& error) {
            said = std::string("not a WorkError: ") + error.what();
        }
        (void)!::write(ends[1], said.data(), said.size());
        ::_exit(0);
    }
    ::close(ends[1]);
    std::string said;
    char buffer[256];
    for (ssize_t got; (got = ::read(ends[0], buffer, sizeof buffer)) > 0;)
        said.append(buffer, static_cast<std::size_t>(got));
    ::close(ends[0]);
    ::waitpid(child, nullptr, 0);
    return said;
}

}  // namespace faultline::test
