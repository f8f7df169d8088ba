// SPDX-License-Identifier: Apache-2.0
// Who is at which run, and how runs ended: by a lock that the process at work holds, and a result that it leaves. The lock is
// a POSIX record lock (fcntl), which ends with its process however that ends, holds over NFS too, and can be asked for without
// being taken, so that looking never disturbs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <faultline/sweep/cell.hpp>

namespace faultline::sweep {

/// Exclusive while it lives. The process must not open the file otherwise: closing it anywhere would end the lock (fcntl(2)).
class FileLock {
  public:
    /// Nothing where another process has it. WorkError where the file cannot be made.
    static std::optional<FileLock> take(const std::string& path);
    /// Waits for the other process.
    static FileLock wait(const std::string& path);
    FileLock(FileLock&& other) noexcept;
    FileLock& operator=(FileLock&&) = delete;
    ~FileLock();
    /// How many steps are done, and who does them, for others to read. Costs a write of some bytes.
    void say(std::int64_t steps) const;

  private:
    explicit FileLock(int descriptor) : descriptor_(descriptor) {}
    int descriptor_ = -1;
};

enum class State : unsigned char {
    to_do,       ///< nobody has begun
    at_work,     ///< a process holds its lock
    stopped,     ///< begun, and ended by an interruption or a kill: goes on from its checkpoint
    failed,      ///< ended with a reason; tried again when the sweep is run again
    done,        ///< to its last step
    not_finite,  ///< done: it ended at a value that was no number
};
[[nodiscard]] std::string_view name(State state);
[[nodiscard]] inline bool is_done(State state) { return state == State::done || state == State::not_finite; }

struct CellState {
    State state = State::to_do;
    std::int64_t steps = 0;  ///< done, as far as somebody said
    std::string what;        ///< failed: the reason; not_finite: which value; at_work, stopped: "host, process 123"
};
[[nodiscard]] CellState state_of(const std::string& folder, const Cell& cell);

/// Leaves the result of a run that is done (not_finite: the value, else empty), or the reason why there is none. For whoever
/// holds the lock. WorkError when the disk refuses.
void write_done(const CellFiles& files, std::int64_t steps, const std::string& not_finite);
void write_failed(const CellFiles& files, const std::string& reason);
/// Whether the run is done, by the result alone: also for whoever holds the lock.
[[nodiscard]] bool has_result(const CellFiles& files);
/// A new attempt begins: an earlier failure is forgotten.
void forget_failure(const CellFiles& files);

}  // namespace faultline::sweep
