// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/terminal.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/partial_file.hpp>

namespace faultline::cli {
namespace {

volatile std::sig_atomic_t interrupt_seen = 0;

/// The second one has its usual effect, once what is half written is gone: nobody would look for it.
void on_interrupt(int signal) {
    if (interrupt_seen == 0) {
        interrupt_seen = 1;
        return;
    }
    remove_partial_files();
    std::signal(signal, SIG_DFL);
    (void)std::raise(signal);  // delivered when this handler returns
}

/// 0, or the errno of the failure.
int write_all(int descriptor, std::string_view text) {
    while (!text.empty()) {
        const ssize_t written = ::write(descriptor, text.data(), text.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno;
        text.remove_prefix(static_cast<std::size_t>(written));
    }
    return 0;
}

std::size_t terminal_width() {
    winsize size{};
    return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

void print(std::string_view text) {
    const int error = write_all(STDOUT_FILENO, text);
    if (error != 0 && error != EPIPE) {
        throw WorkError(fmt::format("standard output: cannot be written ({}): expected room for {} bytes",
                                    std::strerror(error), text.size()));
    }
}

void print_after(const std::function<void()>& write_file, std::string_view text) {
    try {
        write_file();
    } catch (const WorkError&) {
        print(text);
        throw;
    }
    print(text);
}

void remark(std::string_view line) { (void)write_all(STDERR_FILENO, fmt::format("{}\n", line)); }

bool colors() {
    const char* no_color = std::getenv("NO_COLOR");
    const char* term = std::getenv("TERM");
    return ::isatty(STDOUT_FILENO) == 1 && (no_color == nullptr || *no_color == '\0') && term != nullptr &&
           std::string_view(term) != "dumb";
}

void errors_in_place_of_signals() {
    for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);
}

void watch_for_interrupts() {
    struct sigaction action {};
    action.sa_handler = on_interrupt;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
        struct sigaction before {};
        ::sigaction(signal, nullptr, &before);
        if (before.sa_handler != SIG_IGN) ::sigaction(signal, &action, nullptr);
    }
}

bool interrupted() { return interrupt_seen != 0; }

void end_if_interrupted() {
    if (interrupted()) throw WorkError("interrupted, nothing written");
}

std::string duration_text(double seconds) {
    const auto whole = static_cast<long long>(seconds + 0.5);
    if (whole < 60) return fmt::format("{} s", whole);
    if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
    return fmt::format("{} h {} min", whole / 3600, whole / 60 % 60);
}

Progress::Progress(bool shown, bool open_ended)
    : shown_(shown), open_ended_(open_ended), terminal_(::isatty(STDERR_FILENO) == 1) {}
Progress::~Progress() { clear(); }

void Progress::clear() {
    if (line_on_screen_) (void)write_all(STDERR_FILENO, "\r\x1b[K");
    line_on_screen_ = false;
}

void Progress::update(std::size_t done, std::size_t total, std::string_view what) {
    if (!shown_ || total == 0) return;
    const Clock::time_point now = Clock::now();
    const auto pause = terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(5000);
    if (now - last_ < pause) return;
    last_ = now;
    const double seconds = std::chrono::duration<double>(now - started_).count();
    const double rate = static_cast<double>(done) / seconds;
    std::string line = open_ended_
                           ? fmt::format("{} of {} or more", done, total)
                           : fmt::format("{:3.0f}%  {} of {}",
                                         100.0 * static_cast<double>(done) / static_cast<double>(total), done, total);
    if (done > 0 && open_ended_) line += fmt::format(", {:.3g}/s", rate);
    if (done > 0 && !open_ended_)
        line += fmt::format(", {:.3g}/s, {} left", rate, duration_text(static_cast<double>(total - done) / rate));
    line += fmt::format("  {}", what);
    if (!terminal_) {
        remark(line);
        return;
    }
    line.resize(std::min(line.size(), terminal_width() - 1));
    (void)write_all(STDERR_FILENO, "\r" + line + "\x1b[K");
    line_on_screen_ = true;
}

}  // namespace faultline::cli
