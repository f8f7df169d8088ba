// SPDX-License-Identifier: Apache-2.0
// What a command says, and to whom: results on standard output, progress and errors on standard error.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace faultline::cli {

/// Writes all of it to standard output. A reader that has gone away (`| head`) is no error; WorkError when the bytes
/// cannot be written otherwise.
void print(std::string_view text);
/// Writes the file of a result, then prints the result; where one of the two fails, the other is still done.
void print_after(const std::function<void()>& write_file, std::string_view text);
/// One line on standard error; a failure to write it is nobody's business.
void remark(std::string_view line);
/// Whether standard output is a terminal that shows colours: NO_COLOR (no-color.org) and TERM=dumb say no.
[[nodiscard]] bool colors();
/// Writing to a reader that has gone away, or past the limit on a file's size, becomes an error code in place of a signal.
void errors_in_place_of_signals();

/// Ctrl-C, SIGTERM and the end of the terminal (SIGHUP) ask the work to end; a second one ends the program at once and
/// removes the files that it was writing (NAME.partial). One that whoever started us had ignored (nohup, a shell's
/// background job) stays so. For a command to call first: before it reads its inputs.
void watch_for_interrupts();
[[nodiscard]] bool interrupted();
/// WorkError where interrupted(): for a command that has read its inputs and written nothing.
void end_if_interrupted();

/// How far the work is, on standard error: one line that is written over where that is a terminal, else a line every five
/// seconds. Not for several threads at once.
class Progress {
  public:
    /// `open_ended`: the total is what is known of so far, as of a search that goes on from what it finds; then neither a share
    /// nor a time that is left is said.
    explicit Progress(bool shown, bool open_ended = false);
    ~Progress();
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    /// `done` of `total` units; `what` is being done now.
    void update(std::size_t done, std::size_t total, std::string_view what);
    /// Removes the line from a terminal.
    void clear();

  private:
    using Clock = std::chrono::steady_clock;
    bool shown_;
    bool open_ended_;
    bool terminal_;
    bool line_on_screen_ = false;
    Clock::time_point started_ = Clock::now();
    Clock::time_point last_ = started_;
};

/// "45 s", "3 min 20 s", "2 h 5 min".
[[nodiscard]] std::string duration_text(double seconds);

}  // namespace faultline::cli
