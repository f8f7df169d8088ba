// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/rehearsal.hpp>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <exception>

#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <faultline/base/error.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/input.hpp>

namespace faultline {
namespace {

constexpr rlim_t least_seconds = 10;             // of processor time: a thousand times what a small file takes
constexpr std::uint64_t slowest_rate = 4 << 20;  // bytes/s; HDF5 inflates at 50 MB/s and more
constexpr unsigned waits_per_second = 10;        // a loaded machine or a slow disk may take this many times as long

/// Everything that a reader can ask of the file; what it refuses it refuses again in the parent.
template <class Read>
void attempt(Read&& read) {
    try {
        read();
    } catch (const std::exception&) {
    }
}

void read_all(const std::string& path, Rehearsal what) {
    const RecordReader reader(path);
    const auto attributes_of = [&](const std::string& object) {
        for (const std::string& name : reader.attributes(object)) (void)reader.attribute(object, name);
    };
    (void)reader.manifest();
    attributes_of("");
    for (const std::string& dataset : reader.datasets()) {
        attempt([&] { (void)reader.axes(dataset); });
        attempt([&] { attributes_of(dataset); });
        if (what == Rehearsal::structure) continue;
        attempt([&] { (void)reader.read(dataset); });
    }
}

[[noreturn]] void run_child(const std::string& path, Rehearsal what, rlim_t seconds) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // whoever kills the parent means both
    for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGALRM, SIGXCPU}) std::signal(signal, SIG_DFL);
    const rlimit none{0, 0}, time{seconds, seconds};
    ::setrlimit(RLIMIT_CORE, &none);
    ::setrlimit(RLIMIT_CPU, &time);
    ::alarm(static_cast<unsigned>(seconds) * waits_per_second);
    ::mallopt(M_PERTURB, 0xA5);  // memory that nobody has written is no innocent zero: what depends on it crashes here
    // What glibc says of a broken heap is not for the user.
    if (const int nowhere = ::open("/dev/null", O_WRONLY); nowhere >= 0) ::dup2(nowhere, STDERR_FILENO);
    attempt([&] { read_all(path, what); });
    ::_exit(0);
}

}  // namespace

void rehearse_reading(const std::string& path, Rehearsal what) {
    const FileInput in(path);
    const rlim_t seconds = least_seconds + static_cast<rlim_t>(in.size() / slowest_rate);
    const pid_t child = ::fork();
    if (child == 0) run_child(path, what, seconds);
    if (child < 0) return;  // no process to be had: the reader goes on without
    int status = 0;
    while (::waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
    const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    const bool late = signal == SIGXCPU || signal == SIGALRM || signal == SIGKILL;
    throw RequestError(fmt::format("{}: the file cannot be read (HDF5 {} on it): expected a whole HDF5 file", in.name(),
                                   late ? "does not come to an end" : "crashes"));
}

}  // namespace faultline
